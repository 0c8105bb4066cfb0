// A q tile of 64 rows with head sizes above 128, by warp-wide tensor core instructions.
//
// A warp has little room for the results of such heads, or none, so two warps share 16 rows: each
// has the scores of half of the keys and, of all keys, half of the values' columns. They exchange
// their largest scores and the weights through shared memory.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_LARGE_TILE_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_LARGE_TILE_CUH_

#include <algorithm>

#include "common/attention_arguments.h"
#include "cuda/attention/key_loader.cuh"
#include "cuda/attention/rest_tile.cuh"
#include "cuda/attention/split.cuh"
#include "cuda/attention/warp_rows.cuh"

namespace flashxla::attention {

constexpr int kLargeRows = kRestQTileRows, kLargeGroups = kLargeRows / 16;
constexpr int kLargeWarps = 2 * kLargeGroups, kLargeThreads = 32 * kLargeWarps;

// With kKeys keys of a kv tile, of up to kDims dims. Rows are 16 bytes longer than what they hold,
// so that matrix loads have no bank conflicts.
template <int kDims, int kKeys>
struct alignas(16) LargeShared {
  static constexpr int kValueDims = std::min(kDims, static_cast<int>(kMaxValueHeadSize));
  static constexpr int kKeyStride = kDims * 2 + 16;  // also of queries
  static constexpr int kValueStride = kValueDims * 2 + 16;
  static constexpr int kWeightStride = kKeys * 2 + 16;

  char queries[kLargeRows * kKeyStride];
  char keys[kKeys * kKeyStride], values[kKeys * kValueStride];
  char weights[kLargeRows * kWeightStride];
  float row_max[2][kLargeRows], row_sum[2][kLargeRows];  // of each half of the keys
  uint32_t masks[kLargeWarps];  // which of the keys that a warp loads exist
};

template <typename T, int kDims, int kKeys>
class LargeTile {
 public:
  using Shared = LargeShared<kDims, kKeys>;

  __device__ LargeTile(const Problem& problem, char* memory)
      : p(problem), shared(*reinterpret_cast<Shared*>(memory)) {}

  // Computes a q tile's rows with those keys of [begin, end) that they see. `begin` is a multiple
  // of kKeys. All threads of the block must call this, and one of the functions below after it.
  __device__ void Attend(const QTile& tile, int begin, int end) {
    __syncthreads();  // the tile before is done
    LoadQueries(tile);
    auto find = [&](int key) {
      return key < end ? KeyPlaces::Find(p, tile.s, tile.index, key + warp() * kLoads)
                       : KeyPlaces::None();
    };
    KeyPlaces places = find(begin);
    auto load_keys = [&] {
      places.Resolve(p);
      if (lane() == 0) shared.masks[warp()] = places.mask & ((1u << kLoads) - 1);
      LoadRows<Shared::kKeyStride>(p.k, places, tile.kv_head, shared.keys);
      CommitCopies();
    };
    load_keys();
    rows.Begin(p, tile.s, tile.index, tile.kv_head, tile.first_row + group() * 16);
#pragma unroll
    for (int r = 0; r < 2; ++r) row_max[r] = -INFINITY, row_sum[r] = 0.f;
#pragma unroll
    for (int n = 0; n < kHalfDims / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[n][i] = 0.f;
    }
    const int mine = half() * kKeys / 2;  // this half's first key of a kv tile
#pragma unroll 1
    for (int key = begin; key < end; key += kKeys) {
      WaitCopies<0>();
      __syncthreads();  // the keys are there; all have used values and weights
      LoadRows<Shared::kValueStride>(p.v, places, tile.kv_head, shared.values);
      CommitCopies();
      places = find(key + kKeys);
      uint32_t mask = 0;
#pragma unroll
      for (int i = 0; i < kLargeWarps / 2; ++i) {
        mask |= shared.masks[half() * kLargeWarps / 2 + i] << i * kLoads;
      }
      float score[kTiles][4];
      MultiplyKeys(score);
      rows.Score(p, key + mine, mask, score);
      GiveMax(score);
      __syncthreads();  // the largest scores are there; all have used the keys
      load_keys();
      Weigh(score);
      WaitCopies<1>();
      __syncthreads();  // weights and values are there
      AddValues();
    }
    WaitCopies<0>();
    GiveSum();
    __syncthreads();
  }

  // Writes the rows.
  __device__ void Store(const QTile& tile) const {
    const float value_scale = p.ValueScale(tile.index, tile.kv_head);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = tile.first_row + Row(r);
      if (row >= tile.NumRows(p)) continue;
      const int token = tile.s.first_query + row / p.group_size;
      const int head = tile.kv_head * p.group_size + row % p.group_size;
      const RowEnd end = {row_max[r], SumOf(r), p.Sink(head)};
      const float factor = end.Factor() * value_scale;
      if (half() == 0 && lane() % 4 == 0) p.StoreLse(token, head, end);
      ForEachPair(r, [&](int d, float x, float y) {
        const float pair[2] = {x * factor, y * factor};
        if (p.out_pairs) return p.StoreOutPair(token, head, d, pair);
        p.StoreOut(token, head, d, pair[0]);
        if (d + 1 < p.v.head_size) p.StoreOut(token, head, d + 1, pair[1]);
      });
    }
  }

  // Writes a partial result.
  __device__ void StorePartial(const PartialShape& shape, float* partial) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = Row(r);
      if (half() == 0 && lane() % 4 == 0) {
        partial[shape.row_max() + row] = row_max[r], partial[shape.row_sum() + row] = SumOf(r);
      }
      ForEachPair(r, [&](int d, float x, float y) {
        *reinterpret_cast<float2*>(partial + row * shape.dims + d) = make_float2(x, y);
      });
    }
  }

 private:
  static constexpr int kLoads = kKeys / kLargeWarps;  // keys that a warp loads
  static constexpr int kTiles = kKeys / 16;           // of 8 keys, of a half
  static constexpr int kHalfDims = Shared::kValueDims / 2;

  __device__ static int lane() { return static_cast<int>(threadIdx.x & 31); }
  __device__ static int warp() { return static_cast<int>(threadIdx.x / 32); }
  __device__ static int half() { return warp() / kLargeGroups; }
  __device__ static int group() { return warp() % kLargeGroups; }
  // The tile's row that is this lane's r-th.
  __device__ static int Row(int r) { return group() * 16 + lane() / 4 + 8 * r; }
  // Columns that the matrix instructions read: those past the head size are zeros.
  __device__ static int ReadColumns(int head_size) { return (head_size + 15) / 16 * 16; }
  // Blocks of 16 columns of the values that a half has.
  __device__ int Blocks() const { return (p.v.head_size + 31) / 32; }
  __device__ float SumOf(int r) const {
    return shared.row_sum[0][Row(r)] + shared.row_sum[1][Row(r)];
  }

  // Calls body(d, x, y) for this lane's results in columns d and d + 1 of its r-th row.
  template <typename Body>
  __device__ void ForEachPair(int r, Body&& body) const {
#pragma unroll
    for (int n = 0; n < kHalfDims / 8; ++n) {
      const int d = (half() * 2 * Blocks() + n) * 8 + lane() % 4 * 2;
      if (n < 2 * Blocks() && d < p.v.head_size) body(d, out[n][2 * r], out[n][2 * r + 1]);
    }
  }

  __device__ void LoadQueries(const QTile& tile) {
    constexpr int kChunks = kDims / 8;
    const int columns = ReadColumns(p.k.head_size);
    const uint32_t to = SharedAddress(shared.queries);
    for (int i = threadIdx.x; i < kLargeRows * kChunks; i += kLargeThreads) {
      const int d = i % kChunks * 8, row = tile.first_row + i / kChunks;
      if (d >= columns) continue;
      const int query = p.by_group_size.Quotient(row);
      const int head = tile.kv_head * p.group_size + row - query * p.group_size;
      const bool exists = row < tile.NumRows(p) && d < p.k.head_size;
      const int64_t offset =
          exists ? (tile.s.first_query + query) * p.q.stride_token + head * p.q.stride_head + d : 0;
      CopyAsync16(to + i / kChunks * Shared::kKeyStride + d * 2, p.q.data + offset * 2, exists);
    }
  }

  // This warp's rows of keys or values; zeros for those that do not exist.
  template <int kStride>
  __device__ void LoadRows(const Cache& c, const KeyPlaces& places, int kv_head, char* stage) {
    constexpr int kPasses = (kStride - 16 + 511) / 512;  // of all lanes, for a row
    const int columns = ReadColumns(c.head_size);
    const auto mine = reinterpret_cast<unsigned long long>(
        c.data + (places.OffsetIn(c) + kv_head * c.stride_head) * 2);
    const uint32_t to = SharedAddress(stage) + warp() * kLoads * kStride + lane() * 16;
#pragma unroll
    for (int row = 0; row < kLoads; ++row) {
      const auto from = __shfl_sync(kAllLanes, mine, row) + lane() * 16;
      const bool exists = (places.mask >> row) & 1;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int d = pass * 256 + lane() * 8;
        if (d >= columns) continue;
        CopyAsync16(to + row * kStride + pass * 512,
                    reinterpret_cast<const char*>(from) + pass * 512, exists && d < c.head_size);
      }
    }
  }

  // The dot products of the 16 rows with the half's keys.
  __device__ void MultiplyKeys(float (&score)[kTiles][4]) {
    constexpr int kStride = Shared::kKeyStride;
    const int steps = ReadColumns(p.k.head_size) / 16;
    const uint32_t queries =
        SharedAddress(shared.queries) + (group() * 16 + lane() % 16) * kStride + lane() / 16 * 16;
    const uint32_t keys = SharedAddress(shared.keys) +
                          (half() * kKeys / 2 + lane() % 8 + lane() / 16 * 8) * kStride +
                          lane() / 8 % 2 * 16;
    constexpr int kStages = 2;
    uint32_t a[kStages][4], b[kStages][kTiles / 2][4];
    auto load = [&](int k, int stage) {
      LoadMatrices(a[stage], queries + k * 32);
#pragma unroll
      for (int n = 0; n < kTiles / 2; ++n) {
        LoadMatrices(b[stage][n], keys + n * 16 * kStride + k * 32);
      }
    };
    auto multiply = [&](int stage) {
#pragma unroll
      for (int n = 0; n < kTiles / 2; ++n) {
        Multiply<T>(score[2 * n], a[stage], b[stage][n][0], b[stage][n][1]);
        Multiply<T>(score[2 * n + 1], a[stage], b[stage][n][2], b[stage][n][3]);
      }
    };
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) score[n][i] = 0.f;
    }
    // Operands are loaded some steps ahead. The last ones are not used.
#pragma unroll
    for (int n = 0; n < kStages - 1; ++n) load(min(n, steps - 1), n);
#pragma unroll 1
    for (int first = 0; first < steps; first += kStages) {
#pragma unroll
      for (int n = 0; n < kStages; ++n) {
        const int k = first + n;
        load(min(k + kStages - 1, steps - 1), (n + kStages - 1) % kStages);
        if (k < steps) multiply(n);
      }
    }
  }

  // Puts the rows' largest scores where the other half's warp finds them.
  __device__ void GiveMax(const float (&score)[kTiles][4]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float high = -INFINITY;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        high = fmaxf(high, fmaxf(score[n][2 * r], score[n][2 * r + 1]));
      }
      high = fmaxf(high, __shfl_xor_sync(kAllLanes, high, 1));
      high = fmaxf(high, __shfl_xor_sync(kAllLanes, high, 2));
      if (lane() % 4 == 0) shared.row_max[half()][Row(r)] = high;
    }
  }

  // Turns scores into weights, and puts these into shared memory.
  __device__ void Weigh(float (&score)[kTiles][4]) {
    float factor[2];
    bool changed = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float new_max =
          fmaxf(row_max[r], fmaxf(shared.row_max[0][Row(r)], shared.row_max[1][Row(r)]));
      const float base = SoftmaxBase(new_max);
      factor[r] = Exp2(row_max[r] - base);
      changed = changed || new_max != row_max[r];
      row_max[r] = new_max;
      auto* pairs = reinterpret_cast<uint32_t*>(shared.weights + Row(r) * Shared::kWeightStride +
                                                half() * kKeys) +
                    lane() % 4;
      float added = 0.f;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const float x = Exp2(score[n][2 * r] - base), y = Exp2(score[n][2 * r + 1] - base);
        added += x + y;
        pairs[n * 4] = Pack<T>(x, y);
      }
      row_sum[r] = row_sum[r] * factor[r] + added;
    }
    if (!__any_sync(kAllLanes, changed)) return;
#pragma unroll
    for (int n = 0; n < kHalfDims / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[n][i] *= factor[i / 2];
    }
  }

  // Adds the weighted values of all keys, in this half's columns.
  __device__ void AddValues() {
    constexpr int kStride = Shared::kValueStride, kAhead = 4;
    const uint32_t weights = SharedAddress(shared.weights) +
                             (group() * 16 + lane() % 16) * Shared::kWeightStride +
                             lane() / 16 * 16;
    const uint32_t values = SharedAddress(shared.values) + half() * Blocks() * 32 +
                            (lane() % 8 + lane() / 8 % 2 * 8) * kStride + lane() / 16 * 16;
#pragma unroll 1
    for (int k = 0; k < kKeys / 16; ++k) {
      uint32_t a[4], b[kAhead][4];
      LoadMatrices(a, weights + k * 32);
      const uint32_t from = values + k * 16 * kStride;
#pragma unroll
      for (int n = 0; n < kAhead; ++n) LoadMatricesTransposed(b[n], from + n * 32);
#pragma unroll
      for (int n = 0; n < kHalfDims / 16; ++n) {
        // Asked rarely: columns past the last are computed, and not stored.
        if (n % 4 == 0 && n >= Blocks()) break;
        const uint32_t (&now)[4] = b[n % kAhead];
        Multiply<T>(out[2 * n], a, now[0], now[1]);
        Multiply<T>(out[2 * n + 1], a, now[2], now[3]);
        if (n + kAhead < kHalfDims / 16) {
          LoadMatricesTransposed(b[n % kAhead], from + (n + kAhead) * 32);
        }
      }
    }
  }

  // Puts this half's share of the rows' sums where the other half's warp finds it.
  __device__ void GiveSum() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = row_sum[r];
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      if (lane() % 4 == 0) shared.row_sum[half()][Row(r)] = sum;
    }
  }

  const Problem& p;
  Shared& shared;
  WarpRows rows;
  float out[kHalfDims / 8][4];   // not normalized yet
  float row_max[2], row_sum[2];  // largest score (log2); this lane's share of the sum
};

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_LARGE_TILE_CUH_
