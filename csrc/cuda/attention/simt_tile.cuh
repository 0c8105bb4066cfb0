// A q tile of 64 rows on CUDA cores. Keys and values of a kv tile go through shared memory, which
// they reach while the products before are computed. A thread computes 8 rows times kKeys/16 scores
// and kDims/16 dims: the larger its part, the less it reads for each product.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_SIMT_TILE_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_SIMT_TILE_CUH_

#include <type_traits>

#include "cuda/attention/key_loader.cuh"
#include "cuda/attention/simt_item.cuh"

namespace flashxla::attention {

// kOneBuffer: keys and values take turns in one buffer, for want of shared memory.
template <int kDims, int kKeys, int kWarps, bool kOneBuffer>
struct alignas(16) SimtTileShared {
  // Four floats more than a power of two: neighbouring rows start in different banks.
  static constexpr int kStride = kDims + 4;
  // The weights of a kv tile pass in parts of so many keys.
  static constexpr int kWeightKeys = kKeys < 32 ? kKeys : 32;
  // 16 more than a multiple of the 32 banks: a lane pair's rows lie in different banks.
  static constexpr int kWeightStride = kWeightKeys / 32 * 32 + 16;
  float q[kRestQTileRows * kStride];
  float buffers[kOneBuffer ? 1 : 2][kKeys * kStride];  // keys, values
  float weights[kRestQTileRows * kWeightStride];
  SimtRow rows[kRestQTileRows];
  uint32_t exist[2][kWarps];  // which keys of this kv tile and the next, as each warp loads them
};

template <int kDims, int kKeys, int kWarps, bool kFp8, bool kOneBuffer>
class SimtTile {
 public:
  using Shared = SimtTileShared<kDims, kKeys, kWarps, kOneBuffer>;

  // All threads of the block must call this. `shared` and `item` are in use until the block's next
  // barrier.
  __device__ static void Attend(const Problem& p, const SimtItem& item, Shared& shared) {
    LoadQueries<kDims, kStride, true>(p, item, kRestQTileRows, shared.q);
    if (threadIdx.x < kRestQTileRows) shared.rows[threadIdx.x] = item.Row(p, threadIdx.x);
    // To skip values of weight 0, which need not be finite, takes longer. So that is done only if
    // the results without it are not finite.
    for (bool guard = false; !TryAttend(p, item, shared, guard); guard = true) {
    }
  }

 private:
  // A warp has 2 kRows rows; a half of its lanes has every other one.
  static constexpr int kRows = kRestQTileRows / kWarps / 2, kKeysEach = kKeys / 16;
  static constexpr int kColumns = kDims / 16, kParts = kColumns / 4;
  static constexpr int kStride = Shared::kStride, kWeightStride = Shared::kWeightStride;
  static constexpr int kWeightKeys = Shared::kWeightKeys;
  // A warp loads so many keys.
  static constexpr int kLoads = kKeys / kWarps;
  static constexpr uint32_t kWarpMask = (1u << kLoads) - 1;
  static constexpr int kChunks = kDims / 4, kAcross = kChunks < 32 ? kChunks : 32;
  static constexpr int kLoadsAtOnce = 32 / kAcross;
  static_assert(kKeys % 16 == 0 && kDims % 64 == 0 && kLoads <= kSliceKeys &&
                kLoads % kLoadsAtOnce == 0);

  // Stores the results and returns true if they are finite, or if `guard`: then values of weight 0
  // are skipped.
  __device__ static bool TryAttend(const Problem& p, const SimtItem& item, Shared& shared,
                                   bool guard) {
    float* keys = shared.buffers[0];
    float* values = shared.buffers[kOneBuffer ? 0 : 1];
    // Where a kv tile begins must not depend on the q tile: see batch_invariant.
    const int begin = item.begin / kKeys * kKeys;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    KeyPlaces places = Find(p, item, begin);
    auto load_keys = [&](int stage) {
      places.Resolve(p);
      if (lane == 0) shared.exist[stage][warp] = places.mask & kWarpMask;
      StartLoad(p, p.k, places, item.kv_head, keys);
      CommitCopies();
    };
    load_keys(0);

    // The lanes of a pair read the same keys and values: then a load of 16 bytes takes the shared
    // memory half as long.
    const int x = lane / 2, first_row = warp * 2 * kRows + lane % 2;
    const bool idle = warp * 2 * kRows >= item.num_rows;  // the whole warp
    float row_max[kRows], row_sum[kRows];                 // this thread's share of the sum
    float out[kRows][kColumns] = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) row_max[i] = -INFINITY, row_sum[i] = 0.f;

    int stage = 0;
#pragma unroll 1
    for (int first = begin; first < item.end; first += kKeys, stage ^= 1) {
      auto load_values = [&] {
        StartLoad(p, p.v, places, item.kv_head, values);
        CommitCopies();
        places = Find(p, item, first + kKeys);  // used when the next keys are loaded
      };
      WaitCopies<0>();
      __syncthreads();  // the keys are there; all have used the values before
      if (!kOneBuffer) load_values();
      float score[kRows][kKeysEach];
      if (!idle) Multiply(p, shared.q, keys, x, first_row, score);
      if (kOneBuffer) {
        __syncthreads();  // all have used the keys
        load_values();
      }
      if (!idle) {
        AddScores(p, item, first, shared, stage, x, first_row, score, row_max, row_sum, out);
      }
      WaitCopies<0>();
      __syncthreads();  // the values are there; all have used the keys
      const bool more = first + kKeys < item.end;
      if (!kOneBuffer && more) load_keys(stage ^ 1);
      if (!idle) {
        const int num_keys = min(kKeys, item.end - first);
        guard ? AddValues<true>(shared, values, num_keys, x, first_row, score, out)
              : AddValues<false>(shared, values, num_keys, x, first_row, score, out);
      }
      if (kOneBuffer && more) {
        __syncthreads();  // all have used the values
        load_keys(stage ^ 1);
      }
    }
    WaitCopies<0>();  // if no row sees a key, nobody has waited for the first ones
    float probe = 0.f;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) probe = fmaf(0.f, out[i][c], probe);
    }
    if (__syncthreads_or(!(probe == 0.f)) && !guard) return false;
    if (!idle) Store(p, item, x, first_row, row_max, row_sum, out);
    return true;
  }

  // The places of the keys that this warp loads, of the kv tile that starts at key `first`.
  __device__ static KeyPlaces Find(const Problem& p, const SimtItem& item, int first) {
    Sequence seen = item.s;
    seen.first_key = item.begin, seen.num_keys = item.end;
    return KeyPlaces::Find(p, seen, item.index,
                           first + static_cast<int>(threadIdx.x) / 32 * kLoads);
  }

  // Calls body(key, dim) for what this lane loads: 4 dims of the keys of its warp. All lanes.
  template <typename Body>
  __device__ static void ForEachChunk(Body&& body) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kLoads; n += kLoadsAtOnce) {
#pragma unroll
      for (int c = 0; c < kChunks; c += kAcross) body(n + lane / kAcross, (c + lane % kAcross) * 4);
    }
  }

  // Starts to load this warp's keys or values into shared memory; zeros for those that do not
  // exist.
  __device__ static void StartLoad(const Problem& p, const Cache& c, const KeyPlaces& places,
                                   int kv_head, float* to) {
    const int64_t offset = places.OffsetIn(c) + kv_head * c.stride_head;
    to += threadIdx.x / 32 * kLoads * kStride;
    if (kFp8 || !p.kv_vectors) return LoadFloats(p, c, offset, places.mask, to);
    const uint32_t address = SharedAddress(to);
    const auto mine = reinterpret_cast<unsigned long long>(c.data + offset * 4);
    auto start = [&](auto all) {
      ForEachChunk([&](int key, int d) {
        const auto from = __shfl_sync(kAllLanes, mine, key);
        if (d >= p.head_size) return;
        CopyAsync16(address + (key * kStride + d) * 4, reinterpret_cast<const float*>(from) + d,
                    decltype(all)::value || ((places.mask >> key) & 1));
      });
    };
    (places.mask & kWarpMask) == kWarpMask ? start(std::true_type()) : start(std::false_type());
  }

  // The same through registers: fp8, which is widened, and any strides.
  __device__ static void LoadFloats(const Problem& p, const Cache& c, int64_t offset, uint32_t mask,
                                    float* to) {
    constexpr int kEach = kLoads * kChunks / 32, kBest = kFp8 ? 8 : 4;  // of a lane; on their way
    constexpr int kAtOnce = kEach < kBest ? kEach : kBest, kPieces = kChunks / kAcross;
    static_assert(kEach % kAtOnce == 0);
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int base = 0; base < kEach; base += kAtOnce) {
      float4 x[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int key = (base + i) / kPieces * kLoadsAtOnce + lane / kAcross;
        const int d = ((base + i) % kPieces * kAcross + lane % kAcross) * 4;
        const int64_t from = __shfl_sync(kAllLanes, offset, key);
        x[i] = make_float4(0.f, 0.f, 0.f, 0.f);
        if ((mask >> key) & 1) x[i] = LoadFour<kFp8>(p, c, from, d);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int key = (base + i) / kPieces * kLoadsAtOnce + lane / kAcross;
        const int d = ((base + i) % kPieces * kAcross + lane % kAcross) * 4;
        *reinterpret_cast<float4*>(to + key * kStride + d) = x[i];
      }
    }
  }

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
    for (; d + 8 <= p.head_size; d += 8) add_four(d), add_four(d + 4);
    if (d < p.head_size) add_four(d);
    if (d + 4 < p.head_size) add_four(d + 4);
  }

  // Turns dot products into weights and updates the online softmax.
  __device__ static void AddScores(const Problem& p, const SimtItem& item, int first,
                                   const Shared& shared, int stage, int x, int first_row,
                                   float (&score)[kRows][kKeysEach], float (&row_max)[kRows],
                                   float (&row_sum)[kRows], float (&out)[kRows][kColumns]) {
    bool all_exist = true;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) all_exist = all_exist && shared.exist[stage][w] == kWarpMask;
    // Whether every row sees every key, as in most kv tiles.
    const bool all_seen = all_exist && item.plain && first >= item.begin_all &&
                          int64_t{first} + kKeys <= item.end_all;
    if (all_seen) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < kKeysEach; ++j) score[i][j] = item.PlainScore(score[i][j]);
      }
    } else {
      bool exists[kKeysEach];
#pragma unroll
      for (int j = 0; j < kKeysEach; ++j) {
        const int key = x + 16 * j;
        exists[j] = (shared.exist[stage][key / kLoads] >> (key % kLoads)) & 1;
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
        const float factor = Exp2(row_max[i] - Base(new_max[i]));
        row_max[i] = new_max[i];
        row_sum[i] *= factor;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) out[i][c] *= factor;
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float base = Base(row_max[i]);
#pragma unroll
      for (int j = 0; j < kKeysEach; ++j) {
        score[i][j] = Exp2(score[i][j] - base);
        row_sum[i] += score[i][j];
      }
    }
  }

  // What scores are relative to: not -inf, of a row that has seen no key.
  __device__ static float Base(float row_max) { return row_max == -INFINITY ? 0.f : row_max; }

  // Adds the weighted values. A warp reads only weights that it has stored itself. With kGuard,
  // skips values of weight 0, which may be NaN or infinite.
  template <bool kGuard>
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
      AddPart<kGuard>(shared.weights + first_row * kWeightStride,
                      values + part * kWeightKeys * kStride + x * 4,
                      min(kWeightKeys, num_keys - part * kWeightKeys), out);
    }
  }

  template <bool kGuard>
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
      const int row = first_row + 2 * i;
      float total = row_sum[i];
#pragma unroll
      for (int lanes = 2; lanes < 32; lanes *= 2) total += __shfl_xor_sync(kAllLanes, total, lanes);
      if (row >= item.num_rows) continue;
      const int token = item.Token(p, row), head = item.Head(p, row);
      const RowEnd end = {row_max[i], total, p.Sink(head)};
      const float factor = end.Factor() * value_scale;
      if (x == 0) p.StoreLse(token, head, end);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int d = part * 64 + x * 4;
        const float* from = out[i] + part * 4;
        if (p.out_vectors) {
          if (d >= p.head_size) continue;
          p.StoreOutVector(
              token, head, d,
              {from[0] * factor, from[1] * factor, from[2] * factor, from[3] * factor});
          continue;
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          if (d + c < p.head_size) p.StoreOut(token, head, d + c, from[c] * factor);
        }
      }
    }
  }
};

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_SIMT_TILE_CUH_
