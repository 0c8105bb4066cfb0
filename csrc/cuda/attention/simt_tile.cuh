// A q tile of 64 rows on CUDA cores. Each kv tile goes through shared memory, first its keys and
// then its values. A thread computes a 4 x kKeys/16 part of the scores and a 4 x kDims/16 part of
// the output.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_SIMT_TILE_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_SIMT_TILE_CUH_

#include "cuda/attention/simt_item.cuh"

namespace flashxla::attention {

constexpr int64_t kNoKey = INT64_MIN;  // as an offset: the key does not exist

template <int kDims, int kKeys>
struct alignas(16) SimtTileShared {
  // Four floats more than a power of two: neighbouring rows start in different banks.
  static constexpr int kStride = kDims + 4, kWeightStride = kKeys + 4;
  float q[kRestQTileRows * kStride];
  float keys[kKeys * kStride];  // first the keys of a kv tile, then its values
  float weights[kRestQTileRows * kWeightStride];
  int64_t k_offsets[2][kKeys], v_offsets[2][kKeys];  // of this kv tile and the next
  SimtRow rows[kRestQTileRows];
};

template <int kDims, int kKeys, bool kFp8>
class SimtTile {
 public:
  using Shared = SimtTileShared<kDims, kKeys>;

  // All threads of the block must call this. `shared` and `item` are in use until the block's next
  // barrier.
  __device__ static void Attend(const Problem& p, const SimtItem& item, Shared& shared) {
    LoadQueries<kDims, kStride>(p, item, kRestQTileRows, shared.q);
    if (threadIdx.x < kRestQTileRows) shared.rows[threadIdx.x] = item.Row(p, threadIdx.x);
    // Where a kv tile begins must not depend on the q tile: see batch_invariant.
    const int begin = item.begin / kKeys * kKeys;
    FindKeys(p, item, begin, shared, 0);
    __syncthreads();

    const int x = threadIdx.x % 16, first_row = threadIdx.x / 16 * kRows;
    const bool idle = threadIdx.x / 32 * 2 * kRows >= item.num_rows;  // the whole warp
    float row_max[kRows], row_sum[kRows];  // this thread's share of the sum
    float out[kRows][kColumns] = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) row_max[i] = -INFINITY, row_sum[i] = 0.f;

    int stage = 0;
    for (int first = begin; first < item.end; first += kKeys, stage ^= 1) {
      LoadKeys(p, p.k, shared.k_offsets[stage], shared.keys);
      __syncthreads();
      FindKeys(p, item, first + kKeys, shared, stage ^ 1);
      if (!idle) ComputeWeights(p, item, first, shared, stage, x, first_row, row_max, row_sum, out);
      __syncthreads();  // all have used the keys
      const float probe = LoadKeys(p, p.v, shared.v_offsets[stage], shared.keys);
      const bool has_nonfinite = __syncthreads_or(!(probe == 0.f));
      const int num_keys = min(kKeys, item.end - first);
      if (!idle) {
        has_nonfinite ? AddValues<true>(shared, num_keys, x, first_row, out)
                      : AddValues<false>(shared, num_keys, x, first_row, out);
      }
      __syncthreads();  // all have used the values
    }
    if (!idle) Store(p, item, x, first_row, row_max, row_sum, out);
  }

 private:
  static constexpr int kRows = kRestQTileRows / 16, kColumns = kDims / 16, kParts = kColumns / 4;
  static constexpr int kStride = Shared::kStride, kWeightStride = Shared::kWeightStride;
  static_assert(kSimtThreads == 16 * 16 && kKeys % 16 == 0 && kDims % 64 == 0);

  __device__ static void FindKeys(const Problem& p, const SimtItem& item, int first, Shared& shared,
                                  int stage) {
    if (threadIdx.x >= kKeys) return;
    int64_t k = kNoKey, v = kNoKey;
    item.Find(p, first + static_cast<int>(threadIdx.x), &k, &v);
    shared.k_offsets[stage][threadIdx.x] = k;
    shared.v_offsets[stage][threadIdx.x] = v;
  }

  // Loads keys or values into shared memory, zeros for those that do not exist. Returns 0 if all
  // numbers that this thread loaded are finite, else NaN.
  __device__ static float LoadKeys(const Problem& p, const Cache& c, const int64_t* offsets,
                                   float* to) {
    constexpr int kChunks = kDims / 4, kAtOnce = kSimtThreads / kChunks, kUnroll = 4;
    static_assert(kKeys % (kAtOnce * kUnroll) == 0);
    const int d = threadIdx.x % kChunks * 4;
    float probe = 0.f;
#pragma unroll 1
    for (int first = threadIdx.x / kChunks; first < kKeys; first += kAtOnce * kUnroll) {
      float4 x[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int64_t offset = offsets[first + i * kAtOnce];
        x[i] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (offset != kNoKey) x[i] = LoadFour<kFp8>(p, c, offset, d);
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        *reinterpret_cast<float4*>(to + (first + i * kAtOnce) * kStride + d) = x[i];
        probe = fmaf(0.f, x[i].x, fmaf(0.f, x[i].y, fmaf(0.f, x[i].z, fmaf(0.f, x[i].w, probe))));
      }
    }
    return probe;
  }

  // Computes the scores of the kv tile that starts at key `first`, updates the online softmax, and
  // stores the weights. A warp reads only weights that it has stored itself.
  __device__ static void ComputeWeights(const Problem& p, const SimtItem& item, int first,
                                        Shared& shared, int stage, int x, int first_row,
                                        float (&row_max)[kRows], float (&row_sum)[kRows],
                                        float (&out)[kRows][kColumns]) {
    constexpr int kKeysEach = kKeys / 16;
    float score[kRows][kKeysEach] = {};
#pragma unroll 2
    for (int d = 0; d < p.head_size; d += 4) {
      float4 q[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        q[i] = *reinterpret_cast<const float4*>(shared.q + (first_row + i) * kStride + d);
      }
#pragma unroll
      for (int j = 0; j < kKeysEach; ++j) {
        const float4 k = *reinterpret_cast<const float4*>(shared.keys + (x + 16 * j) * kStride + d);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          score[i][j] = fmaf(q[i].x, k.x, score[i][j]);
          score[i][j] = fmaf(q[i].y, k.y, score[i][j]);
          score[i][j] = fmaf(q[i].z, k.z, score[i][j]);
          score[i][j] = fmaf(q[i].w, k.w, score[i][j]);
        }
      }
    }
    bool exists[kKeysEach];
#pragma unroll
    for (int j = 0; j < kKeysEach; ++j) exists[j] = shared.k_offsets[stage][x + 16 * j] != kNoKey;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const SimtRow row = shared.rows[first_row + i];
      float new_max = -INFINITY;
#pragma unroll
      for (int j = 0; j < kKeysEach; ++j) {
        score[i][j] = item.Score(p, row, first + x + 16 * j, exists[j], score[i][j]);
        new_max = fmaxf(new_max, score[i][j]);
      }
#pragma unroll
      for (int lanes = 8; lanes > 0; lanes /= 2) {
        new_max = fmaxf(new_max, __shfl_xor_sync(kAllLanes, new_max, lanes));
      }
      new_max = fmaxf(new_max, row_max[i]);
      const float base = new_max == -INFINITY ? 0.f : new_max;
      const float factor = exp2f(row_max[i] - base);
      row_max[i] = new_max;
      row_sum[i] *= factor;
#pragma unroll
      for (int j = 0; j < kKeysEach; ++j) {
        const float weight = exp2f(score[i][j] - base);
        row_sum[i] += weight;
        shared.weights[(first_row + i) * kWeightStride + x + 16 * j] = weight;
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) out[i][c] *= factor;
    }
  }

  // With kGuard, skips values of weight 0, which may be NaN or infinite.
  template <bool kGuard>
  __device__ static void AddValues(const Shared& shared, int num_keys, int x, int first_row,
                                   float (&out)[kRows][kColumns]) {
#pragma unroll 1
    for (int k = 0; k < num_keys; k += 4) {
      float weight[kRows][4];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float4 w =
            *reinterpret_cast<const float4*>(shared.weights + (first_row + i) * kWeightStride + k);
        weight[i][0] = w.x, weight[i][1] = w.y, weight[i][2] = w.z, weight[i][3] = w.w;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const float4 v =
              *reinterpret_cast<const float4*>(shared.keys + (k + j) * kStride + part * 64 + x * 4);
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            if (kGuard && weight[i][j] == 0.f) continue;
            float* to = out[i] + part * 4;
            to[0] = fmaf(weight[i][j], v.x, to[0]);
            to[1] = fmaf(weight[i][j], v.y, to[1]);
            to[2] = fmaf(weight[i][j], v.z, to[2]);
            to[3] = fmaf(weight[i][j], v.w, to[3]);
          }
        }
      }
    }
  }

  __device__ static void Store(const Problem& p, const SimtItem& item, int x, int first_row,
                               const float (&row_max)[kRows], const float (&row_sum)[kRows],
                               const float (&out)[kRows][kColumns]) {
    const float value_scale = p.ValueScale(item.index, item.kv_head);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float total = row_sum[i];
#pragma unroll
      for (int lanes = 8; lanes > 0; lanes /= 2) total += __shfl_xor_sync(kAllLanes, total, lanes);
      if (first_row + i >= item.num_rows) continue;
      const int token = item.Token(p, first_row + i), head = item.Head(p, first_row + i);
      const float2 end = FinishRow(row_max[i], total, p.Sink(head));
      const float factor = end.x * value_scale;
      if (x == 0) p.StoreLse(token, head, end.y);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int d = c / 4 * 64 + x * 4 + c % 4;
        if (d < p.head_size) p.StoreOut(token, head, d, out[i][c] * factor);
      }
    }
  }
};

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_SIMT_TILE_CUH_
