// A q tile of 64 rows on CUDA cores: exact to float32, whatever the numbers are. A thread computes
// 8 rows times kKeys/16 scores and kDims/16 dims: the larger its part, the less it reads for each
// product.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_SIMT_TILE_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_SIMT_TILE_CUH_

#include "cuda/attention/float_tiles.cuh"

namespace flashxla::attention {

template <typename Tiles>
class SimtTile {
 public:
  using Shared = typename Tiles::Shared;

  // Computes the rows that are not stored, after Tiles::Begin. All threads of the block must call
  // this. `shared` and `item` are in use until the block's next barrier.
  __device__ static void Attend(const Problem& p, const SimtItem& item, Shared& shared) {
    // The lanes of a pair read the same keys and values: then a load of 16 bytes takes the shared
    // memory half as long.
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int x = lane / 2, first_row = warp * 2 * kRows + lane % 2;
    const bool idle = warp * 2 * kRows >= item.num_rows;  // the whole warp
    float row_max[kRows], row_sum[kRows];                 // this thread's share of the sum
    float out[kRows][kColumns] = {}, score[kRows][kKeysEach];
#pragma unroll
    for (int i = 0; i < kRows; ++i) row_max[i] = -INFINITY, row_sum[i] = 0.f;
    Tiles::ForEach(
        p, item, shared,
        [&](const float* keys) {
          if (!idle) Multiply(p, shared.q, keys, x, first_row, score);
        },
        [&](int first, int stage) {
          if (idle) return;
          AddScores(p, item, first, shared, stage, x, first_row, score, row_max, row_sum, out);
        },
        [&](const float* values, int num_keys) {
          if (!idle) AddValues(shared, values, num_keys, x, first_row, score, out);
        });
    if (!idle) Store(p, item, shared, x, first_row, row_max, row_sum, out);
  }

 private:
  static constexpr int kDims = Tiles::kDims, kKeys = Tiles::kKeys, kWarps = Tiles::kWarps;
  // A warp has 2 kRows rows; a half of its lanes has every other one.
  static constexpr int kRows = kRestQTileRows / kWarps / 2, kKeysEach = kKeys / 16;
  static constexpr int kColumns = kDims / 16, kParts = kColumns / 4;
  static constexpr int kStride = Shared::kStride, kWeightStride = Shared::kWeightStride;
  static constexpr int kWeightKeys = Shared::kWeightKeys;

  // The dot products with keys x, x + 16, ... of the kv tile.
  __device__ static void Multiply(const Problem& p, const float* queries, const float* keys, int x,
                                  int first_row, float (&score)[kRows][kKeysEach]) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kKeysEach; ++j) score[i][j] = 0.f;
    }
    auto add_four = [&](int d) {
      float4 q[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        q[i] = *reinterpret_cast<const float4*>(queries + (first_row + 2 * i) * kStride + d);
      }
#pragma unroll
      for (int j = 0; j < kKeysEach; ++j) {
        const float4 k = *reinterpret_cast<const float4*>(keys + (x + 16 * j) * kStride + d);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          score[i][j] = fmaf(q[i].x, k.x, score[i][j]);
          score[i][j] = fmaf(q[i].y, k.y, score[i][j]);
          score[i][j] = fmaf(q[i].z, k.z, score[i][j]);
          score[i][j] = fmaf(q[i].w, k.w, score[i][j]);
        }
      }
    };
    int d = 0;
#pragma unroll 1
    for (; d + 8 <= p.k.head_size; d += 8) add_four(d), add_four(d + 4);
    if (d < p.k.head_size) add_four(d);
    if (d + 4 < p.k.head_size) add_four(d + 4);
  }

  // Turns dot products into weights and updates the online softmax.
  __device__ static void AddScores(const Problem& p, const SimtItem& item, int first,
                                   const Shared& shared, int stage, int x, int first_row,
                                   float (&score)[kRows][kKeysEach], float (&row_max)[kRows],
                                   float (&row_sum)[kRows], float (&out)[kRows][kColumns]) {
    if (Tiles::AllSeen(item, shared, first, stage)) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < kKeysEach; ++j) score[i][j] = item.PlainScore(score[i][j]);
      }
    } else {
      bool exists[kKeysEach];
#pragma unroll
      for (int j = 0; j < kKeysEach; ++j) {
        exists[j] = Tiles::Exists(shared, stage, x + 16 * j);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const SimtRow row = shared.rows[first_row + 2 * i];
#pragma unroll
        for (int j = 0; j < kKeysEach; ++j) {
          score[i][j] = item.Score(p, row, first + x + 16 * j, exists[j], score[i][j]);
        }
      }
    }
    // All rows together, so that none waits for another.
    float new_max[kRows];
    bool changed = false;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      new_max[i] = row_max[i];
#pragma unroll
      for (int j = 0; j < kKeysEach; ++j) new_max[i] = fmaxf(new_max[i], score[i][j]);
    }
#pragma unroll
    for (int lanes = 2; lanes < 32; lanes *= 2) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        new_max[i] = fmaxf(new_max[i], __shfl_xor_sync(kAllLanes, new_max[i], lanes));
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) changed = changed || new_max[i] != row_max[i];
    if (__any_sync(kAllLanes, changed)) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float factor = Exp2(row_max[i] - SoftmaxBase(new_max[i]));
        row_max[i] = new_max[i];
        row_sum[i] *= factor;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) out[i][c] *= factor;
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float base = SoftmaxBase(row_max[i]);
#pragma unroll
      for (int j = 0; j < kKeysEach; ++j) {
        score[i][j] = Exp2(score[i][j] - base);
        row_sum[i] += score[i][j];
      }
    }
  }

  // Adds the weighted values. A warp reads only weights that it has stored itself. Skips
  // values of weight 0, which may be NaN or infinite.
  __device__ static void AddValues(Shared& shared, const float* values, int num_keys, int x,
                                   int first_row, const float (&score)[kRows][kKeysEach],
                                   float (&out)[kRows][kColumns]) {
#pragma unroll
    for (int part = 0; part < kKeys / kWeightKeys; ++part) {
      __syncwarp();  // the part before was read
#pragma unroll
      for (int j = 0; j < kWeightKeys / 16; ++j) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          shared.weights[(first_row + 2 * i) * kWeightStride + x + 16 * j] =
              score[i][part * (kWeightKeys / 16) + j];
        }
      }
      __syncwarp();
      AddPart(shared.weights + first_row * kWeightStride,
              values + part * kWeightKeys * kStride + x * 4,
              min(kWeightKeys, num_keys - part * kWeightKeys), out);
    }
  }

  __device__ static void AddPart(const float* weights, const float* values, int num_keys,
                                 float (&out)[kRows][kColumns]) {
    // Past num_keys weights are 0, and values that were loaded.
#pragma unroll 1
    for (int k = 0; k < num_keys; k += 4) {
      float weight[kRows][4];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float4 w = *reinterpret_cast<const float4*>(weights + 2 * i * kWeightStride + k);
        weight[i][0] = w.x, weight[i][1] = w.y, weight[i][2] = w.z, weight[i][3] = w.w;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const float4 v = *reinterpret_cast<const float4*>(values + (k + j) * kStride + part * 64);
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            if (weight[i][j] == 0.f) continue;
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

  __device__ static void Store(const Problem& p, const SimtItem& item, const Shared& shared, int x,
                               int first_row, const float (&row_max)[kRows],
                               const float (&row_sum)[kRows], const float (&out)[kRows][kColumns]) {
    const float value_scale = p.ValueScale(item.index, item.kv_head);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = first_row + 2 * i;
      float total = row_sum[i];
#pragma unroll
      for (int lanes = 2; lanes < 32; lanes *= 2) total += __shfl_xor_sync(kAllLanes, total, lanes);
      if (row >= item.num_rows || shared.stored[row]) continue;
      const int token = item.Token(p, row), head = item.Head(p, row);
      const RowEnd end = {row_max[i], total, p.Sink(head)};
      const float factor = end.Factor() * value_scale;
      if (x == 0) p.StoreLse(token, head, end);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const float* from = out[i] + part * 4;
        p.StoreOutFour(token, head, part * 64 + x * 4,
                       {from[0] * factor, from[1] * factor, from[2] * factor, from[3] * factor});
      }
    }
  }
};

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_SIMT_TILE_CUH_
