// The consumer warpgroups of large_cluster.cu: scores, softmax and output of the 64 rows of a
// thread block.
//
// The results of such heads fill the registers of two warpgroups, so both have all rows: each has
// the scores of half of the keys of a kv tile and, of all its keys, half of the values' columns.
// They exchange their largest scores and the weights through shared memory. While the tensor cores
// add the values of a kv tile, for which the scores of the next one have been computed before, the
// softmax of these is computed.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_LARGE_CLUSTER_CONSUME_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_LARGE_CLUSTER_CONSUME_CUH_

#include "cuda/attention/large_cluster_shared.cuh"
#include "cuda/attention/matrix_product.cuh"
#include "cuda/attention/warp_rows.cuh"

namespace flashxla::attention {

#if defined(FLASHXLA_HOPPER)

// T: of queries, keys and values; kValueBlocks: blocks of values that each warpgroup has.
template <typename T, int kValueBlocks>
class ClusterConsumer : LargeHalf {
 public:
  // partials: the shape of partial results; null if there are none.
  __device__ ClusterConsumer(const Problem& problem, const PartialShape* partials,
                             ClusterShared& shared_memory)
      : LargeHalf(shared_memory.exchange),
        p(problem),
        partial_shape(partials),
        shared(shared_memory) {}

  // Computes this thread block's rows of a segment.
  __device__ void Compute(const LargeSegment& segment) {
    Attend(segment.tile, FromFirstLane(segment.begin), FromFirstLane(segment.end));
    segment.partial == nullptr ? Store(segment.tile) : StorePartial(segment.tile, segment.partial);
  }

 private:
  // Computes the rows of `tile` with those keys of [begin, end) that they see.
  __device__ void Attend(const QTile& tile, int begin, int end) {
    LoadQueries(tile);
    rows.Begin(p, tile.s, tile.index, tile.kv_head, FirstRow(tile) + group() * 16);
    BeginRows();
#pragma unroll
    for (int block = 0; block < kValueBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 32; ++i) out[block][i] = 0.f;
    }
    WaitCopies<0>();
    FenceProxy();
    Sync();  // the queries are there
    if (begin < end) {
      float score[kTiles][4];
      uint32_t weights[2][kSteps][4];  // of each half of the keys
      StartScores(score, LargeBlocks(p.k.head_size));
      GiveBack();
      Pin(Flat(score));
#pragma unroll 1
      for (int key = begin; key < end; key += kClusterKeys) {
        Score(key + half * kClusterHalfKeys, score);
        GiveMax(score);
        Sync();  // the largest scores are there; all have read the weights before
        float factor[2];
        uint32_t mine[kSteps][4];
        const bool changed = WeighKeys(score, factor, mine);
        Sync();  // the weights are there; all have read the largest scores
        GiveBack();
#pragma unroll
        for (int block = 0; block < kValueBlocks; ++block) Pin(out[block]);
        if (changed) Rescale(factor);
        StartScores(score, key + kClusterKeys < end ? LargeBlocks(p.k.head_size) : 0);
        TakeWeights(mine, weights);
        AddValues(weights);
        FinishScores(score);
      }
      GiveBack();
#pragma unroll
      for (int block = 0; block < kValueBlocks; ++block) Pin(out[block]);
    }
    GiveSum();
    Sync();
  }

  // Writes the rows. Each warp puts what it has into shared memory, where the queries were, so that
  // it can write whole vectors, and does so in a loop: instructions that run once take longest to
  // arrive.
  __device__ void Store(const QTile& tile) {
    constexpr int kStride = 2 * kColumns * 2 + 16;  // bytes of a row: no two lanes meet in a bank
    static_assert(kLargeRows * kStride <= sizeof(shared.queries));
    const float value_scale = p.ValueScale(tile.index, tile.kv_head);
    char* const rows_of_warp = shared.queries[0] + group() * 16 * kStride + half * kColumns * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = FirstRow(tile) + Row(r);
      const RowPlace place = p.PlaceOf(tile.s.first_query, tile.kv_head, row);
      float factor = 0.f;
      if (row < tile.NumRows(p)) {
        const RowEnd end = {row_max[r], SumOf(r), p.Sink(place.head)};
        factor = end.Factor() * value_scale;
        if (half == 0 && lane() % 4 == 0) p.StoreLse(place.token, place.head, end);
      }
      char* const to = rows_of_warp + (lane() / 4 + 8 * r) * kStride + lane() % 4 * 4;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        const float* const pair = out[n / 8] + n % 8 * 4 + 2 * r;
        *reinterpret_cast<uint32_t*>(to + n * 16) = Pack<T>(pair[0] * factor, pair[1] * factor);
      }
    }
    __syncwarp();
    const int columns = min(p.v.head_size - half * kColumns, kColumns);
    const int first_row = FirstRow(tile) + group() * 16;
    const int count = min(tile.NumRows(p) - first_row, 16);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const RowPlace place = p.PlaceOf(tile.s.first_query, tile.kv_head, first_row + i);
      const char* const from = rows_of_warp + i * kStride;
      auto* const to = reinterpret_cast<uint16_t*>(p.out.data) + place.token * p.out.stride_token +
                       place.head * p.out.stride_head + half * kColumns * p.out.stride_dim;
      if (p.out_unit == 16) {
        const int d = lane() * 8;
        if (d < columns) {
          *reinterpret_cast<uint4*>(to + d) = *reinterpret_cast<const uint4*>(from + d * 2);
        }
      } else {
#pragma unroll 1
        for (int d = lane(); d < columns; d += 32) {
          to[d * p.out.stride_dim] = *reinterpret_cast<const uint16_t*>(from + d * 2);
        }
      }
    }
    Sync();  // the next queries may come
  }

  // Writes a partial result.
  __device__ void StorePartial(const QTile& tile, float* partial) const {
    const PartialShape& shape = *partial_shape;
    const int first = half * kColumns + lane() % 4 * 2, columns = p.v.head_size - first;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (FirstRow(tile) + Row(r) >= tile.NumRows(p)) continue;
      const int row = rank * kLargeRows + Row(r);
      if (half == 0 && lane() % 4 == 0) {
        partial[shape.row_max() + row] = row_max[r], partial[shape.row_sum() + row] = SumOf(r);
      }
      float* const to = partial + row * shape.dims + first;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        const float* const pair = out[n / 8] + n % 8 * 4 + 2 * r;
        if (n * 8 < columns) *reinterpret_cast<float2*>(to + n * 8) = make_float2(pair[0], pair[1]);
      }
    }
  }

  static constexpr int kTiles = kClusterHalfKeys / 8;                 // of 8 keys
  static constexpr int kSteps = kClusterHalfKeys / 16;                // of 16 keys
  static constexpr int kColumns = kValueBlocks * kLargeBlockColumns;  // of values, of a warpgroup
  static constexpr int kLag = 2;  // units whose products may not be finished
  // Named barriers: of all consumers, and of each warpgroup.
  static constexpr int kBarrier = 1, kHalfBarrier = 2;

  __device__ static int thread() { return static_cast<int>(threadIdx.x) % kWarpgroupThreads; }
  // The first of this thread block's rows.
  __device__ int FirstRow(const QTile& tile) const { return tile.first_row + rank * kLargeRows; }
  __device__ static void Sync() { SyncNamed(kBarrier, kClusterConsumers); }

  // Units.

  __device__ void Await() { WaitBarrier(SharedAddress(&shared.full[state.stage]), state.parity); }
  // This warpgroup's block of the next unit.
  __device__ char* Block() const { return shared.units[state.stage][half]; }
  // The products with the unit have been started.
  __device__ void Advance() {
    CommitMatrix();
    state.Next();
    WaitMatrix<kLag>();
    if (held == kLag) {
      ReleaseBefore(1 + kLag);
    } else {
      ++held;
    }
  }
  __device__ void ReleaseBefore(int count) {
    const uint32_t empty =
        SharedAddress(&shared.empty[(state.stage - count) & ClusterShared::kUnits - 1]);
    Release(empty);
    if (lane() == 0) ReleaseOf(empty, rank ^ 1);
  }
  // Waits for all products, and gives back their units.
  __device__ void GiveBack() {
    WaitMatrix<0>();
    for (; held > 0; --held) ReleaseBefore(held);
  }

  // Products.

  // The dot products of the 64 rows with the half's keys, of so many blocks of columns.
  __device__ __forceinline__ void StartScores(float (&score)[kTiles][4], int blocks) {
    const uint64_t queries = MatrixDescriptor(SharedAddress(shared.queries), 0);
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      Await();
      const uint64_t keys = MatrixDescriptor(SharedAddress(Block()), 0);
      FenceMatrix();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        MatrixProduct<T, kClusterHalfKeys>::Start(
            Flat(score), After(queries, block * kClusterBlockBytes + k * 32), After(keys, k * 32),
            block > 0 || k > 0);
      }
      Advance();
    }
  }
  // After more than kLag units more.
  __device__ __forceinline__ void FinishScores(float (&score)[kTiles][4]) {
    WaitMatrix<kLag>();
    Pin(Flat(score));
  }

  // Adds the weighted values of all keys, in this warpgroup's columns.
  __device__ __forceinline__ void AddValues(const uint32_t (&weights)[2][kSteps][4]) {
#pragma unroll
    for (int of_half = 0; of_half < 2; ++of_half) {
      const uint64_t stale = shared.stale[kv_tile][of_half];
#pragma unroll
      for (int block = 0; block < kValueBlocks; ++block) {
        Await();
        if (__builtin_expect(stale != 0, false)) ZeroStale(stale);
        const uint64_t values = MatrixDescriptor(SharedAddress(Block()), 0);
        FenceMatrix();
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          MatrixProduct<T, kLargeBlockColumns>::template Start<true>(
              out[block], weights[of_half][k], After(values, k * 16 * kLargeRowBytes), true);
        }
        Advance();
      }
    }
    kv_tile = (kv_tile + 1) % ClusterShared::kMasks;
  }

  // Zeroes the values of keys that do not exist: they may hold NaN, and 0 times NaN is not 0.
  __device__ __forceinline__ void ZeroStale(uint64_t stale) {
    const uint32_t zeros[4] = {};
    const uint32_t block = SharedAddress(Block());
#pragma unroll 1
    for (int i = thread(); i < kClusterBlockBytes / 16; i += kWarpgroupThreads) {
      if ((stale >> i / (kLargeRowBytes / 16)) & 1) StoreShared16(block + i * 16, zeros);
    }
    FenceProxy();
    SyncNamed(kHalfBarrier + half, kWarpgroupThreads);
  }

  // Softmax.

  __device__ __forceinline__ void Score(int first, float (&score)[kTiles][4]) {
    static_assert(kTiles == 8);
    const uint64_t exist = shared.exist[kv_tile][half];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows.Score(p, first + i * 32, static_cast<uint32_t>(exist >> i * 32),
                 *reinterpret_cast<float (*)[kTiles / 2][4]>(score[i * kTiles / 2]));
    }
  }

  // Turns scores into weights, in the order of the products' operands, and gives them to the other
  // warpgroup, whose threads have the same rows. factor: of what came before. Returns whether that
  // is to be multiplied by it.
  __device__ __forceinline__ bool WeighKeys(const float (&score)[kTiles][4], float (&factor)[2],
                                            uint32_t (&weights)[kSteps][4]) {
    const bool changed = Weigh(score, factor, [&](int r, int n, float x, float y) {
      weights[n / 2][n % 2 * 2 + r] = Pack<T>(x, y);
    });
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      StoreShared16(SharedAddress(&shared.weights[half][k][thread()]), weights[k]);
    }
    return changed;
  }

  // mine: this half's.
  __device__ __forceinline__ void TakeWeights(const uint32_t (&mine)[kSteps][4],
                                              uint32_t (&weights)[2][kSteps][4]) const {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const uint4 x = LoadShared<uint4>(SharedAddress(&shared.weights[half ^ 1][k][thread()]));
      const uint32_t others[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weights[0][k][i] = half == 0 ? mine[k][i] : others[i];
        weights[1][k][i] = half == 0 ? others[i] : mine[k][i];
      }
    }
  }

  __device__ __forceinline__ void Rescale(const float (&factor)[2]) {
#pragma unroll
    for (int block = 0; block < kValueBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 32; ++i) out[block][i] *= factor[i / 2 % 2];
    }
  }

  // Starts to load the queries. All consumers are done with those before: see the end of Store.
  __device__ void LoadQueries(const QTile& tile) {
    const int chunks = LargeBlocks(p.k.head_size) * (kLargeBlockColumns / 8);
    const uint32_t to = SharedAddress(shared.queries);
    constexpr int kThreadsOfRow = kClusterConsumers / kLargeRows;
    const int of_tile = static_cast<int>(threadIdx.x) / kThreadsOfRow;
    const int row = FirstRow(tile) + of_tile;
    const RowPlace from = p.PlaceOf(tile.s.first_query, tile.kv_head, row);
    const bool exists = row < tile.NumRows(p);
    const int64_t first = exists ? from.token * p.q.stride_token + from.head * p.q.stride_head : 0;
#pragma unroll 1
    for (int chunk = threadIdx.x % kThreadsOfRow; chunk < chunks; chunk += kThreadsOfRow) {
      const bool inside = exists && chunk * 8 < p.k.head_size;
      const uint32_t place = to + chunk / 8 * kClusterBlockBytes + of_tile * kLargeRowBytes +
                             (chunk % 8 ^ of_tile % 8) * 16;
      CopyAsync16(place, p.q.data + (inside ? first + chunk * 8 : 0) * 2, inside);
    }
    CommitCopies();
  }

  const Problem& p;
  const PartialShape* partial_shape;
  ClusterShared& shared;
  const int rank = ClusterRank();
  WarpRows rows = {};
  float out[kValueBlocks][32];  // not normalized yet
  PipelineState<ClusterShared::kUnits> state;
  int held = 0;     // units before that one which are not given back
  int kv_tile = 0;  // the present one's masks
};

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_LARGE_CLUSTER_CONSUME_CUH_
