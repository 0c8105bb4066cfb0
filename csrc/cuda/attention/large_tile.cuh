// A q tile of 64 rows with head sizes above 128: on Hopper by its matrix instructions (wgmma), else
// by warp-wide ones.
//
// A warp has little room for the results of such heads, or none, so two warps share 16 rows: each
// has the scores of half of the keys and, of all keys, half of the values' columns. They exchange
// their largest scores and the weights through shared memory. The four warps of a half are a
// warpgroup, whose results lie in registers as those of warp-wide instructions do.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_LARGE_TILE_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_LARGE_TILE_CUH_

#include <algorithm>

#include "common/attention_arguments.h"
#include "cuda/attention/dtypes.cuh"
#include "cuda/attention/key_loader.cuh"
#include "cuda/attention/large_half.cuh"
#include "cuda/attention/large_segments.cuh"
#include "cuda/attention/matrix_product.cuh"
#include "cuda/attention/warp_rows.cuh"

namespace flashxla::attention {

constexpr int kLargeWarps = 2 * kLargeGroups, kLargeThreads = 32 * kLargeWarps;

// With kKeys keys of a kv tile, of up to kDims dims.
template <int kDims, int kKeys>
struct alignas(1024) LargeShared {
  static constexpr int kValueDims = std::min(kDims, static_cast<int>(kMaxValueHeadSize));
  static_assert(kDims % kLargeBlockColumns == 0 && kKeys <= kLargeBlockColumns);

  char queries[kDims / kLargeBlockColumns][kLargeRows * kLargeRowBytes];
  char keys[kDims / kLargeBlockColumns][kKeys * kLargeRowBytes];
  char values[kValueDims / kLargeBlockColumns][kKeys * kLargeRowBytes];
  char weights[kLargeRows * kLargeRowBytes];
  LargeExchange exchange;
  uint32_t masks[kKeys / 8];  // which of 8 keys exist
};

// kFp8: of keys and values. Queries are fp8, too, or T.
template <typename T, int kDims, int kKeys, bool kFp8>
class LargeTile : LargeHalf {
 public:
  using Shared = LargeShared<kDims, kKeys>;
  // Of weights and values. float16 holds all fp8 numbers, and takes less time to widen to.
  using Weight = std::conditional_t<kFp8, __half, T>;

  __device__ LargeTile(const Problem& problem, char* memory)
      : LargeTile(problem, *reinterpret_cast<Shared*>(memory)) {}

  // All threads of the block must call this. partials: their shape, where the result may be one.
  __device__ void Compute(const LargeSegment& segment, const PartialShape* partials = nullptr) {
    Attend(segment.tile, FromFirstLane(segment.begin), FromFirstLane(segment.end));
    segment.partial == nullptr ? Store(segment.tile)
                               : StorePartial(segment.tile, *partials, segment.partial);
  }

 private:
  __device__ LargeTile(const Problem& problem, Shared& shared_memory)
      : LargeHalf(shared_memory.exchange), p(problem), shared(shared_memory) {}

  // Computes a q tile's rows with those keys of [begin, end) that they see. `begin` is a multiple
  // of kKeys.
  __device__ void Attend(const QTile& tile, int begin, int end) {
    __syncthreads();  // the tile before is done
    LoadQueries(tile);
    auto find = [&](int key) {
      return key < end ? KeyPlaces::Find(p, tile.s, tile.index, key + 8 * LoadedGroup())
                       : KeyPlaces::None();
    };
    KeyPlaces places = find(begin);
    auto load_keys = [&] {
      places.Resolve(p);
      if (lane() == 0) shared.masks[LoadedGroup()] = places.mask & 0xff;
      LoadRows(p.k, places, tile.kv_head, shared.keys[0]);
      CommitCopies();
    };
    load_keys();
    rows.Begin(p, tile.s, tile.index, tile.kv_head, tile.first_row + group() * 16);
    BeginRows();
#pragma unroll
    for (int n = 0; n < kHalfDims / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[n][i] = 0.f;
    }
    const int mine = half * kKeys / 2;  // this half's first key of a kv tile
#pragma unroll 1
    for (int key = begin; key < end; key += kKeys) {
      WaitCopies<0>();
      if constexpr (kFp8) WidenRows<T>(p.k, shared.keys[0]);
      ShowStores();
      FinishValues();
      __syncthreads();  // the keys are there; all have used values and weights
      float score[kTiles][4];
      StartScores(score);
      LoadRows(p.v, places, tile.kv_head, shared.values[0]);
      CommitCopies();
      places = find(key + kKeys);
      uint32_t mask = 0;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        mask |= shared.masks[half * kTiles + i] << i * 8;
      }
      FinishScores(score);
      rows.Score(p, key + mine, mask, score);
      GiveMax(score);
      __syncthreads();  // the largest scores are there; all have used the keys
      load_keys();
      WeighKeys(score);
      WaitCopies<1>();
      if constexpr (kFp8) WidenRows<Weight>(p.v, shared.values[0]);
      ShowStores();
      __syncthreads();  // weights and values are there
      StartValues();
    }
    WaitCopies<0>();
    FinishValues();
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
      const RowPlace place = p.PlaceOf(tile.s.first_query, tile.kv_head, row);
      const RowEnd end = {row_max[r], SumOf(r), p.Sink(place.head)};
      const float factor = end.Factor() * value_scale;
      if (half == 0 && lane() % 4 == 0) p.StoreLse(place.token, place.head, end);
      ForEachPair(r, [&](int d, float x, float y) {
        const float pair[2] = {x * factor, y * factor};
        if (p.out_pairs) return p.StoreOutPair(place.token, place.head, d, pair);
        p.StoreOut(place.token, place.head, d, pair[0]);
        if (d + 1 < p.v.head_size) p.StoreOut(place.token, place.head, d + 1, pair[1]);
      });
    }
  }

  // Writes a partial result.
  __device__ void StorePartial(const QTile& tile, const PartialShape& shape, float* partial) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = Row(r);
      if (tile.first_row + row >= tile.NumRows(p)) continue;
      if (half == 0 && lane() % 4 == 0) {
        partial[shape.row_max() + row] = row_max[r], partial[shape.row_sum() + row] = SumOf(r);
      }
      ForEachPair(r, [&](int d, float x, float y) {
        *reinterpret_cast<float2*>(partial + row * shape.dims + d) = make_float2(x, y);
      });
    }
  }

  // Warps that share 8 rows of keys and values: they load a block of columns each, in turns.
  static constexpr int kSharing = kLargeWarps * 8 / kKeys;
  static constexpr int kTiles = kKeys / 16;  // of 8 keys, of a half
  static constexpr int kHalfDims = Shared::kValueDims / 2, kLeastHalfDims = 128;
  static constexpr int kBlockBytes = kKeys * kLargeRowBytes;  // of keys and values

  __device__ static int LoadedGroup() { return warp() / kSharing; }
  __device__ static int FirstLoadedBlock() { return warp() % kSharing; }
  // Columns of the values that a half has.
  __device__ int HalfColumns() const {
    return max(LargeBlocks((p.v.head_size + 1) / 2) * kLargeBlockColumns, kLeastHalfDims);
  }
  // Calls body(d, x, y) for this lane's results in columns d and d + 1 of its r-th row.
  template <typename Body>
  __device__ void ForEachPair(int r, Body&& body) const {
#pragma unroll
    for (int n = 0; n < kHalfDims / 8; ++n) {
      const int d = half * HalfColumns() + n * 8 + lane() % 4 * 2;
      if (n * 8 < HalfColumns() && d < p.v.head_size) body(d, out[n][2 * r], out[n][2 * r + 1]);
    }
  }

  __device__ void LoadQueries(const QTile& tile) {
    constexpr int kChunks = kDims / 8;
    const int columns = LargeBlocks(p.k.head_size) * kLargeBlockColumns;
    const uint32_t to = SharedAddress(shared.queries);
    for (int i = threadIdx.x; i < kLargeRows * kChunks; i += kLargeThreads) {
      const int d = i % kChunks * 8, row = tile.first_row + i / kChunks;
      if (d >= columns) continue;
      const RowPlace from = p.PlaceOf(tile.s.first_query, tile.kv_head, row);
      const bool exists = row < tile.NumRows(p) && d < p.k.head_size;
      const int64_t offset =
          exists ? from.token * p.q.stride_token + from.head * p.q.stride_head + d : 0;
      const uint32_t place = to + d / kLargeBlockColumns * kLargeRows * kLargeRowBytes +
                             i / kChunks * kLargeRowBytes + (d / 8 % 8 ^ i / kChunks % 8) * 16;
      if (kFp8 && p.q_dtype != p.out_dtype) {  // of fp8
        const uint2 raw =
            exists ? *reinterpret_cast<const uint2*>(p.q.data + offset) : make_uint2(0, 0);
        p.q_dtype == FLASHXLA_F8E5M2 ? StoreWidened<T, true>(place, raw)
                                     : StoreWidened<T, false>(place, raw);
      } else {
        CopyAsync16(place, p.q.data + offset * 2, exists);
      }
    }
  }

  // What a lane copies of its warp's rows in a block of columns: a vector of 16 bytes, in fp8 of
  // one row, else of two, 4 rows apart. Rows of fp8 lie in the first half of what they become: a
  // copy is slow where neighbours in memory are none in shared memory.
  static constexpr int kBytes = kFp8 ? 1 : 2;
  static constexpr int kLanesOfRow = kLargeBlockColumns * kBytes / 16;
  __device__ static int Late() { return kFp8 ? lane() / 4 % 2 : 0; }
  __device__ static int LoadedRow() { return lane() / 8 + Late() * 4; }
  __device__ static int LoadedVector() { return lane() % kLanesOfRow; }
  // Where in a stage's first block a chunk of the lane's row lies.
  __device__ static uint32_t PlaceOf(const char* stage, int chunk) {
    return SharedAddress(stage) + (LoadedGroup() * 8 + LoadedRow()) * kLargeRowBytes +
           (chunk ^ LoadedRow()) * 16;
  }

  // Starts to copy this warp's rows of keys or values; zeros for those that do not exist.
  __device__ static void LoadRows(const Cache& c, const KeyPlaces& places, int kv_head,
                                  char* stage) {
    constexpr int kRows = kFp8 ? 1 : 2;
    const auto mine = reinterpret_cast<unsigned long long>(
        c.data + (places.OffsetIn(c) + kv_head * c.stride_head) * kBytes);
    const char* from[kRows];
    bool exists[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = LoadedRow() + 4 * i;
      from[i] = reinterpret_cast<const char*>(__shfl_sync(kAllLanes, mine, row));
      exists[i] = (places.mask >> row) & 1;
    }
    const uint32_t place = PlaceOf(stage, LoadedVector());
#pragma unroll 3
    for (int block = FirstLoadedBlock(); block < LargeBlocks(c.head_size); block += kSharing) {
      const int column = block * kLargeBlockColumns + LoadedVector() * (16 / kBytes);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        CopyAsync16((place ^ i * 64) + i * 4 * kLargeRowBytes + block * kBlockBytes,
                    from[i] + column * kBytes, exists[i] && column < c.head_size);
      }
    }
  }

  template <typename To, bool kE5m2>
  __device__ static void StoreWidened(uint32_t to, uint2 raw) {
    uint32_t wide[4];
    WidenTo<To, kE5m2>(raw.x, &wide[0], &wide[1]), WidenTo<To, kE5m2>(raw.y, &wide[2], &wide[3]);
    StoreShared16(to, wide);
  }

  // Widens this warp's rows, each lane what it copied.
  template <typename To>
  __device__ void WidenRows(const Cache& c, const char* stage) const {
    p.kv_dtype == FLASHXLA_F8E5M2 ? WidenRows<To, true>(c, stage) : WidenRows<To, false>(c, stage);
  }
  template <typename To, bool kE5m2>
  __device__ static void WidenRows(const Cache& c, const char* stage) {
    constexpr int kTogether = 3;  // loads that wait together
    // Rows r and r + 4 are stored together: each lane's halves in such an order that no two lanes
    // meet in a bank.
    const uint32_t raw_place = PlaceOf(stage, LoadedVector());
    const uint32_t wide_place = PlaceOf(stage, LoadedVector() * 2 + Late());
    const int blocks = LargeBlocks(c.head_size);
#pragma unroll 1
    for (int first = FirstLoadedBlock(); first < blocks; first += kTogether * kSharing) {
      uint4 raw[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int block = first + i * kSharing;
        if (block < blocks) raw[i] = LoadShared<uint4>(raw_place + block * kBlockBytes);
      }
      __syncwarp();  // a wide row lies over what it comes from
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int block = first + i * kSharing;
        if (block >= blocks) break;
        const uint32_t at = wide_place + block * kBlockBytes;
        const uint2 low = make_uint2(raw[i].x, raw[i].y), high = make_uint2(raw[i].z, raw[i].w);
        StoreWidened<To, kE5m2>(at, Late() ? high : low);
        StoreWidened<To, kE5m2>(at ^ 16, Late() ? low : high);
      }
    }
  }

#if defined(FLASHXLA_HOPPER)

  // To be called after stores that matrix instructions are to see, before the barrier.
  __device__ static void ShowStores() { FenceProxy(); }

  // The dot products of the 64 rows with the half's keys.
  __device__ void StartScores(float (&score)[kTiles][4]) const {
    const uint64_t queries = MatrixDescriptor(SharedAddress(shared.queries), 0);
    const uint64_t keys = MatrixDescriptor(SharedAddress(shared.keys) + half * kBlockBytes / 2, 0);
    const int blocks = LargeBlocks(p.k.head_size);
    // A group for each block: around the loop, ptxas would add fences of its own.
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      FenceMatrix();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        MatrixProduct<T, kKeys / 2>::Start(
            Flat(score), After(queries, block * kLargeRows * kLargeRowBytes + k * 32),
            After(keys, block * kBlockBytes + k * 32), block > 0 || k > 0);
      }
      CommitMatrix();
    }
  }
  __device__ static void FinishScores(float (&score)[kTiles][4]) {
    WaitMatrix<0>();
    Pin(Flat(score));
  }

  // Adds the weighted values of all keys, in this half's columns.
  __device__ void StartValues() {
    if constexpr (kHalfDims > kLeastHalfDims) {
      if (HalfColumns() == 256) return AddValues<256>();
      if (HalfColumns() == 192) return AddValues<192>();
    }
    AddValues<kLeastHalfDims>();
  }
  __device__ void FinishValues() {
    WaitMatrix<0>();
    Pin(Flat(out));
  }

  template <int kColumns>
  __device__ void AddValues() {
    const uint64_t weights = MatrixDescriptor(SharedAddress(shared.weights), 0);
    const uint64_t values = MatrixDescriptor(
        SharedAddress(shared.values) + half * (kColumns / kLargeBlockColumns) * kBlockBytes,
        kBlockBytes);
    FenceMatrix();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      MatrixProduct<Weight, kColumns>::template Start<false, true>(
          reinterpret_cast<float (&)[kColumns / 2]>(out), After(weights, k * 32),
          After(values, k * 16 * kLargeRowBytes), true);
    }
    CommitMatrix();
  }

#else

  __device__ static void ShowStores() {}
  __device__ static void FinishScores(float (&)[kTiles][4]) {}
  __device__ static void FinishValues() {}

  // The dot products of the 16 rows with the half's keys.
  __device__ void StartScores(float (&score)[kTiles][4]) const {
    const int steps = LargeBlocks(p.k.head_size) * 4;
    const uint32_t queries = SharedAddress(shared.queries) +
                             (group() * 16 + lane() % 16) * kLargeRowBytes +
                             (lane() / 16 ^ lane() % 8) * 16;
    const uint32_t keys = SharedAddress(shared.keys) +
                          (half * kKeys / 2 + lane() % 8 + lane() / 16 * 8) * kLargeRowBytes +
                          (lane() / 8 % 2 ^ lane() % 8) * 16;
    constexpr int kStages = 2;
    uint32_t a[kStages][4], b[kStages][kTiles / 2][4];
    auto load = [&](int k, int stage) {
      LoadMatrices(a[stage], (queries ^ k % 4 * 32) + k / 4 * kLargeRows * kLargeRowBytes);
#pragma unroll
      for (int n = 0; n < kTiles / 2; ++n) {
        LoadMatrices(b[stage][n],
                     (keys ^ k % 4 * 32) + k / 4 * kBlockBytes + n * 16 * kLargeRowBytes);
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
    // Operands are loaded a step ahead. The last ones are not used.
    load(0, 0);
#pragma unroll 1
    for (int first = 0; first < steps; first += kStages) {
#pragma unroll
      for (int n = 0; n < kStages; ++n) {
        load(min(first + n + 1, steps - 1), (n + 1) % kStages);
        multiply(n);
      }
    }
  }

  // Adds the weighted values of all keys, in this half's columns.
  __device__ void StartValues() {
    constexpr int kAhead = 4;
    const uint32_t weights = SharedAddress(shared.weights) +
                             (group() * 16 + lane() % 16) * kLargeRowBytes +
                             (lane() / 16 ^ lane() % 8) * 16;
    const uint32_t values =
        SharedAddress(shared.values) + half * (HalfColumns() / kLargeBlockColumns) * kBlockBytes +
        (lane() % 8 + lane() / 8 % 2 * 8) * kLargeRowBytes + (lane() / 16 ^ lane() % 8) * 16;
#pragma unroll 1
    for (int k = 0; k < kKeys / 16; ++k) {
      uint32_t a[4], b[kAhead][4];
      LoadMatrices(a, weights ^ k * 32);
      const uint32_t from = values + k * 16 * kLargeRowBytes;
      auto load = [&](int n) {
        LoadMatricesTransposed(b[n % kAhead], (from ^ n % 4 * 32) + n / 4 * kBlockBytes);
      };
#pragma unroll
      for (int n = 0; n < kAhead; ++n) load(n);
#pragma unroll
      for (int n = 0; n < kHalfDims / 16; ++n) {
        if (n % 4 == 0 && n * 16 >= HalfColumns()) break;
        const uint32_t (&now)[4] = b[n % kAhead];
        Multiply<Weight>(out[2 * n], a, now[0], now[1]);
        Multiply<Weight>(out[2 * n + 1], a, now[2], now[3]);
        if (n + kAhead < kHalfDims / 16) load(n + kAhead);
      }
    }
  }

#endif  // FLASHXLA_HOPPER

  // Turns scores into weights, and puts these into shared memory.
  __device__ void WeighKeys(const float (&score)[kTiles][4]) {
    float factor[2];
    const bool changed = Weigh(score, factor, [&](int r, int n, float x, float y) {
      char* const row = shared.weights + Row(r) * kLargeRowBytes + lane() % 4 * 4;
      *reinterpret_cast<uint32_t*>(row + ((half * kTiles + n) ^ Row(r) % 8) * 16) =
          Pack<Weight>(x, y);
    });
    if (!changed) return;
#pragma unroll
    for (int n = 0; n < kHalfDims / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[n][i] *= factor[i / 2];
    }
  }

  const Problem& p;
  Shared& shared;
  WarpRows rows;
  float out[kHalfDims / 8][4];  // not normalized yet
};

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_LARGE_TILE_CUH_
