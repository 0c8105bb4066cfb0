// A warpgroup's share of a q tile of swap: scores, softmax and output of up to 64 rows.
//
// Keys are the rows of the products and queries the columns: S^T = K Q^T, O^T = V^T P^T. So few
// queries leave no part of a matrix instruction empty, and keys and values go from shared memory
// straight to the tensor cores.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_TILE_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_TILE_CUH_

#include "cuda/attention/matrix_product.cuh"
#include "cuda/attention/swap_fp8.cuh"
#include "cuda/attention/swap_shared.cuh"

namespace flashxla::attention {

#if defined(FLASHXLA_HOPPER)

// Whether x holds in any thread of the warpgroup, which it also synchronizes.
__device__ inline bool AnyOfWarpgroup(int group, bool x) {
  int any;
  asm volatile(
      "{.reg .pred p, q; setp.ne.b32 p, %1, 0; bar.red.or.pred q, %2, %3, p; selp.b32 %0, 1, 0, q;}"
      : "=r"(any)
      : "r"(int{x}), "r"(SwapBarrier(group)), "n"(kWarpgroupThreads)
      : "memory");
  return any;
}

// The largest value, or the sum, of the 8 lanes with the same lane % 4.
__device__ inline float MaxOfColumn(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}
__device__ inline float SumOfColumn(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

// Stores 8x8 matrices turned: lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void StoreTurned(uint32_t address, const uint32_t (&r)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address),
               "r"(r[0]), "r"(r[1])
               : "memory");
}

// Turns an 8x8 matrix of 16-bit numbers, of which lane l has numbers l % 4 * 2 and the next of row
// l / 4.
__device__ inline uint32_t Turned(uint32_t pair) {
  uint32_t turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}

// Zeroes the values of keys that do not exist: they may hold NaN, and 0 times NaN is not 0. Those
// of boxes that are not there are 0 already. All consumer warps must call it.
template <typename S>
__device__ void ZeroValues(const SwapShared<S>& shared, int stage) {
  if constexpr (S::kCopied) return;  // those are 0, too
  const uint64_t stale = shared.stale(stage);
  if (stale == 0) return;
  constexpr int kChunks = S::kRowBytes / 16, kVectors = S::kBlocks * kChunks;  // of a key
  constexpr int kAtOnce = S::kConsumerThreads / kVectors;                      // keys
  const int vector = threadIdx.x % kVectors, end = 64 - __clzll(static_cast<int64_t>(stale));
  char* to = shared.stage_data(stage) + S::kHalfBytes + vector / kChunks * S::kBlockBytes +
             vector % kChunks * 16;
#pragma unroll 1
  for (int key = __ffsll(static_cast<int64_t>(stale)) - 1 + threadIdx.x / kVectors; key < end;
       key += kAtOnce) {
    if (stale >> key & 1 && threadIdx.x < kAtOnce * kVectors) {
      *reinterpret_cast<uint4*>(to + key * S::kRowBytes) = make_uint4(0, 0, 0, 0);
    }
  }
  FenceProxy();
  SyncNamed(kSwapConsumers, S::kConsumerThreads);
}

// S: the SwapShape. A thread has kRows / 4 rows, of which it sees the keys lane / 4 and
// lane / 4 + 8 of its warp's 16, and the same places among the dims of the output.
template <typename S, int kRows>
struct SwapTile {
  using T = typename S::Product;
  static constexpr int kOwn = kRows / 4;
  static constexpr int kOutTiles = S::kOutTiles;
  // A row's scores are relative to its base, which follows its largest score only if that exceeds
  // it by this much (log2). So the sums are rarely rescaled.
  static constexpr float kSlack = 8.f;

  const SwapShared<S>& shared;
  typename S::Rows& rows;
  const int group, warp, lane;      // warp: in the warpgroup
  int first_row;                    // of this warpgroup
  float out[kOutTiles][kRows / 2];  // not normalized yet
  float limit[kOwn];                // base + kSlack; -inf as long as the row has seen no key
  float sum[kOwn];                  // this thread's share
  float scale;                      // factor of the dot products; includes log2(e) if plain
  float second_scale;               // the same of a pair's second head
  bool second[kOwn];                // whether a row is of that
  int begin_all, end_all;           // keys that all rows see
  bool plain;                       // no softcap, no ALiBi

  // The rows of the q tile of `at` that group `group` has, kRows of them.
  __device__ SwapTile(const SwapShared<S>& s, int warp_index, const Cursor& at)
      : shared(s),
        rows(s.rows(warp_index / kSwapGroupWarps)),
        group(warp_index / kSwapGroupWarps),
        warp(warp_index % kSwapGroupWarps),
        lane(threadIdx.x & 31),
        first_row(at.first_row + group * kRows) {}

  // The row of own row i: element e of the accumulators belongs to own row e / 4 * 2 + e % 2.
  __device__ int RowOf(int i) const { return i / 2 * 8 + lane % 4 * 2 + i % 2; }
  static constexpr int OwnOf(int e) { return e / 4 * 2 + e % 2; }

  __device__ int thread() const { return threadIdx.x % kWarpgroupThreads; }
  __device__ void SyncGroup() const { SyncNamed(SwapBarrier(group), kWarpgroupThreads); }

  // Starts the rows.
  __device__ void Begin(const SwapProblem& w, const Cursor& at, int kv_head) {
    const Problem& p = w.p;
    const Sequence& s = at.sequence;
    const int num_rows = s.num_queries * p.group_size;
    LoadQueries(w, at, kv_head);
    PrefetchNextQueries(p, s, kv_head);
    plain = p.softcap <= 0.f && p.alibi_slopes.data == nullptr;
    const int last_row = min(first_row + kRows, num_rows) - 1;
    begin_all = p.Visible(s, p.by_group_size.Quotient(last_row)).begin;
    end_all = p.Visible(s, p.by_group_size.Quotient(first_row)).end;
    if (thread() < kRows) {
      const int i = thread(), row = first_row + i;
      const bool exists = row < num_rows;
      rows.keys[i] = KeyRange{0, 0};
      if (exists && s.num_queries == 1) {
        rows.keys[i] = {begin_all, end_all};  // the other warps wait for this one
      } else if (exists) {
        rows.keys[i] = p.Visible(s, p.by_group_size.Quotient(row));
      }
      if (!plain) {
        const int query = p.by_group_size.Quotient(row);
        const int head = kv_head * p.group_size + row - query * p.group_size;
        rows.slope[i] = exists ? p.alibi_slopes.at(at.index, head, 0.f) : 0.f;
        rows.diagonal[i] = int64_t{query} + s.length - s.num_queries;
      }
    }
    WaitCopies<0>();
    FenceProxy();
    SyncGroup();
    const float unit = plain ? kLog2e : 1.f;
    const int first_kv_head = S::kPairs ? 2 * kv_head : kv_head;
    scale = p.ScoreScale(at.index, first_kv_head) * unit;
    if constexpr (S::kPairs) {
      second_scale = p.ScoreScale(at.index, first_kv_head + 1) * unit;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) second[i] = IsSecond(p, RowOf(i));
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) limit[i] = -INFINITY, sum[i] = 0.f;
#pragma unroll
    for (auto& tile : out) {
#pragma unroll
      for (float& x : tile) x = 0.f;
    }
  }

  // Takes the step of 64 keys from `first` on, which are in `stage`. is_first: of this thread
  // block's steps of the q tile. await_values() is called once, before the values are used.
  template <typename Await>
  __device__ void Step(const Problem& p, int stage, int first, bool is_first,
                       Await&& await_values) {
    const uint64_t mask = shared.mask(stage);
    const uint32_t keys = shared.stage(stage), values = keys + S::kHalfBytes;
    const uint64_t weights = MatrixDescriptor(shared.weights(group), 0);
    const uint64_t queries = MatrixDescriptor(shared.queries(group), 0);
    const bool e5m2 = p.kv_dtype == FLASHXLA_F8E5M2;
    float score[kRows / 2];
    uint32_t wide_values[S::kFp8 ? kOutTiles : 1][4][4];
    // While the scores are computed; with more rows registers lack.
    constexpr bool kWidenEarly = S::kFp8 && kRows <= 16;
    auto widen_values = [&] {
      if constexpr (S::kFp8) {
        e5m2 ? WidenValues<true, S::kDims>(values, warp, wide_values)
             : WidenValues<false, S::kDims>(values, warp, wide_values);
      }
    };
    if constexpr (S::kFp8) {
      uint32_t wide_keys[S::kDims / 16][4];
      e5m2 ? WidenKeys<true, S::kDims>(keys, warp, wide_keys)
           : WidenKeys<false, S::kDims>(keys, warp, wide_keys);
      FenceMatrix();
#pragma unroll
      for (int k = 0; k < S::kDims / 16; ++k) {
        MatrixProduct<__half, kRows>::Start(score, wide_keys[k], After(queries, QueryOffset(k)),
                                            k > 0);
      }
      CommitMatrix();
      if constexpr (kWidenEarly) await_values(), widen_values();
    } else {
      if constexpr (S::kCopied) FenceProxy();  // other threads' copies
      const uint64_t descriptor = MatrixDescriptor(keys, 0);
      // Of all rows, and of the keys' columns from step `first` of 16 on.
      auto start = [&](float (&c)[kRows / 2], int first) {
#pragma unroll
        for (int k = 0; k < S::kColumnSteps; ++k) {
          const int step = first + k;
          MatrixProduct<T, kRows>::template Start<false, false>(
              c, After(descriptor, step / 4 * S::kBlockBytes + step % 4 * 32),
              After(queries, QueryOffset(k)), k > 0);
        }
      };
      FenceMatrix();
      start(score, 0);
      if constexpr (S::kPairs) {
        float other[kRows / 2];
        start(other, S::kColumnSteps);
        CommitMatrix();
        WaitMatrix<0>();
        Pin(other);
        Pin(score);
#pragma unroll
        for (int e = 0; e < kRows / 2; ++e) {
          score[e] = second[OwnOf(e)] ? other[e] * second_scale : score[e] * scale;
        }
      } else {
        CommitMatrix();
      }
    }
    WaitMatrix<0>();
    Pin(score);
    Weigh(p, score, first, is_first, mask);
    StoreWeights(score);
    if constexpr (!kWidenEarly) await_values(), widen_values();
    FenceProxy();
    SyncGroup();
    const uint64_t descriptor = MatrixDescriptor(values, 0);
    FenceMatrix();
#pragma unroll
    for (int tile = 0; tile < kOutTiles; ++tile) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint64_t part = After(weights, k * 32);
        if constexpr (S::kFp8) {
          MatrixProduct<__half, kRows>::Start(out[tile], wide_values[tile][k], part, true);
        } else {
          MatrixProduct<T, kRows>::template Start<true, false>(
              out[tile], After(descriptor, tile * S::kBlockBytes + k * 16 * S::kRowBytes), part,
              true);
        }
      }
    }
    CommitMatrix();
    WaitMatrix<0>();
#pragma unroll
    for (auto& tile : out) Pin(tile);
  }

  // Takes such a step of large heads, block by block of columns: see swap_stream.cuh. mask_index:
  // of the step's mask.
  __device__ void Stream(const Problem& p, int mask_index, int first, bool is_first, int& stage,
                         uint32_t& parity);

  // Ends the softmax: the rows' sums and largest scores are known to the warpgroup then.
  __device__ void End() {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float x = SumOfColumn(sum[i]);
      if (lane >= 4) continue;
      rows.exchange[warp][RowOf(i)] = x;
      if (warp == 0) rows.row_max[RowOf(i)] = row_max(i);
    }
    SyncGroup();
  }

  // Writes the rows, after End. Those of 16-bit keys are turned: few of them in registers, more in
  // shared memory, in place of the queries, so that memory is written in vectors.
  __device__ void Store(const SwapProblem& w, const Cursor& at, int kv_head) const {
    const Problem& p = w.p;
    const int num_rows = RowsOf(p, at);
    if (thread() < num_rows) {
      RowEnd end = {rows.row_max[thread()], SumOf(thread()), -INFINITY};
      if (p.sinks != nullptr || p.lse != nullptr) {  // most often neither
        const RowPlace place = PlaceOf(p, at, kv_head, thread());
        end.sink = p.Sink(place.head);
        p.StoreLse(place.token, place.head, end);
      }
      const int own = S::kPairs ? PlaceOf(p, at, kv_head, thread()).kv_head : kv_head;
      rows.factor[thread()] = end.Factor() * p.ValueScale(at.index, own);
    }
    SyncGroup();
    using Out = typename S::Out;
    auto row_of = [&](int row) {
      const RowPlace place = PlaceOf(p, at, kv_head, row);
      return reinterpret_cast<Out*>(p.out.data) + place.token * p.out.stride_token +
             place.head * p.out.stride_head;
    };
    if constexpr (kRows == 8 && !S::kFp8) {
      if (w.out_vectors) {
        const float factors[2] = {rows.factor[RowOf(0)], rows.factor[RowOf(1)]};
        const int row = lane / 4, first = warp * 16 + lane % 4 * 2;
        Out* const to = row_of(min(row, num_rows - 1));
#pragma unroll
        for (int tile = 0; tile < kOutTiles; ++tile) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float* x = &out[tile][2 * half];
            const uint32_t pair = Turned(Pack<Out>(x[0] * factors[0], x[1] * factors[1]));
            const int d = tile * 64 + half * 8 + first - FirstColumn(p, row);
            if (row < num_rows && d >= 0 && d < p.v.head_size) {
              *reinterpret_cast<uint32_t*>(to + d) = pair;
            }
          }
        }
        return;
      }
    }
    if (S::kPairs || !w.out_vectors) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (RowOf(i) >= num_rows) continue;
        const float factor = rows.factor[RowOf(i)];
        Out* to = row_of(RowOf(i));
        ForEachDim(p, i, [&](int d, float x) {
          if (d < p.v.head_size) to[d * p.out.stride_dim] = static_cast<Out>(x * factor);
        });
      }
      return;
    }
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      const float factors[2] = {rows.factor[RowOf(2 * n)], rows.factor[RowOf(2 * n + 1)]};
#pragma unroll
      for (int tile = 0; tile < kOutTiles; ++tile) {
        const float* x = &out[tile][4 * n];
        if constexpr (S::kFp8) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            StoreShared4(RowAddress(RowOf(2 * n + i), SwapValueDim(tile, warp, lane / 4, 0)),
                         Pack<Out>(x[i] * factors[i], x[2 + i] * factors[i]));
          }
        } else {
          const uint32_t pairs[2] = {Pack<Out>(x[0] * factors[0], x[1] * factors[1]),
                                     Pack<Out>(x[2] * factors[0], x[3] * factors[1])};
          StoreTurned(RowAddress(n * 8 + lane % 8, tile * 64 + warp * 16 + lane / 8 % 2 * 8),
                      pairs);
        }
      }
    }
    SyncGroup();
    constexpr int kChunks = S::kValueDims / 8;
#pragma unroll 1
    for (int i = thread(); i < num_rows * kChunks; i += kWarpgroupThreads) {
      const int row = i / kChunks, d = i % kChunks * 8;
      const uint4 x = LoadShared<uint4>(RowAddress(row, d));
      if (d < p.v.head_size) StoreGlobal16(row_of(row) + d, &x.x);
    }
    SyncGroup();  // the next queries come to the same place
  }

  // Writes a partial result, after End.
  __device__ void StorePartial(const Problem& p, const Cursor& at, const PartialShape& shape,
                               float* partial) const {
    if (thread() < RowsOf(p, at)) {
      partial[shape.row_max() + group * kRows + thread()] = rows.row_max[thread()];
      partial[shape.row_sum() + group * kRows + thread()] = SumOf(thread());
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (RowOf(i) >= RowsOf(p, at)) continue;
      float* to = partial + (group * kRows + RowOf(i)) * shape.dims;
      ForEachDim(p, i, [&](int d, float x) { to[d] = x; });
    }
  }

 private:
  __device__ float row_max(int i) const { return limit[i] - kSlack; }
  __device__ float BaseOf(int i) const { return limit[i] == -INFINITY ? 0.f : limit[i] - kSlack; }

  __device__ RowPlace PlaceOf(const Problem& p, const Cursor& at, int kv_head, int row) const {
    return p.PlaceOf(at.sequence.first_query, kv_head, first_row + row);
  }
  // Where dim d of a row is on its way to memory, and that of 16-bit queries.
  __device__ uint32_t RowAddress(int row, int d) const {
    return shared.queries(group) + (d / 64 * kRows + row) * S::kRowBytes +
           (d / 8 % 8 ^ row % 8) * 16 + d % 8 * 2;
  }

  // How many rows there are, at most kRows.
  __device__ int RowsOf(const Problem& p, const Cursor& at) const {
    return min(at.sequence.num_queries * p.group_size - first_row, kRows);
  }
  __device__ float SumOf(int row) const {
    float x = 0.f;
#pragma unroll
    for (int w = 0; w < kSwapGroupWarps; ++w) x += rows.exchange[w][row];
    return x;
  }

  // Whether a row is of a pair's second head, and the column of out^T where its head begins.
  __device__ bool IsSecond(const Problem& p, int row) const {
    return S::kPairs && p.PlaceOf(0, 0, first_row + row).kv_head > 0;
  }
  __device__ int FirstColumn(const Problem& p, int row) const {
    return IsSecond(p, row) ? S::kPairedDims : 0;
  }

  template <typename Body>
  __device__ void ForEachDim(const Problem& p, int i, Body&& body) const {
    const int first = FirstColumn(p, RowOf(i));
#pragma unroll
    for (int tile = 0; tile < kOutTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int d = S::kFp8 ? SwapValueDim(tile, warp, lane / 4, half)
                              : tile * 64 + warp * 16 + lane / 4 + half * 8;
        if (S::kPairs && (d < first || d >= first + S::kPairedDims)) continue;
        body(d - first, out[tile][i / 2 * 4 + half * 2 + i % 2]);
      }
    }
  }

  // Of dims [16 k, 16 k + 16) of the queries.
  static constexpr int QueryOffset(int k) { return k / 4 * kRows * S::kRowBytes + k % 4 * 32; }

  // Brings the queries into shared memory, by copies that are still to be awaited; rows and dims
  // that do not exist are 0. With fp8 keys, bf16 queries become f16, each row divided by a power of
  // two that brings it near 1.
  __device__ void LoadQueries(const SwapProblem& w, const Cursor& at, int kv_head) const {
    constexpr int kChunks = S::kQueryDims / 8;  // of 8 dims
    constexpr int kVectors = kRows * kChunks;
    constexpr int kEach = (kVectors + kWarpgroupThreads - 1) / kWarpgroupThreads;
    constexpr int kAtOnce = kEach < 4 ? kEach : 4;  // loads that overlap
    const Problem& p = w.p;
    const int num_rows = at.sequence.num_queries * p.group_size - first_row;
    if constexpr (S::kStreams && S::kFp8) return LoadQueryRows(w, at, kv_head, num_rows);
    // Finds the row that vector i belongs to; false if the vector does not exist.
    auto offset_of = [&](int i, int64_t* offset) {
      const int row = i / kChunks, d = i % kChunks * 8;
      if (row >= num_rows || d >= p.k.head_size) return false;
      const RowPlace place = PlaceOf(p, at, kv_head, row);
      *offset = place.token * p.q.stride_token + place.head * p.q.stride_head;
      return true;
    };
    if (!S::kFp8 && w.q_vectors) {
#pragma unroll
      for (int n = 0; n < kEach; ++n) {
        const int i = thread() + n * kWarpgroupThreads;
        if (i >= kVectors) break;
        int64_t offset = 0;
        const bool exists = offset_of(i, &offset);
        CopyAsync16(RowAddress(i / kChunks, i % kChunks * 8),
                    p.q.data + (offset + i % kChunks * 8) * 2, exists);
      }
      CommitCopies();
      return;
    }
#pragma unroll 1
    for (int first = thread(); first < kVectors; first += kAtOnce * kWarpgroupThreads) {
      uint32_t x[kAtOnce][4] = {};
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int i = first + n * kWarpgroupThreads;
        int64_t offset = 0;
        if (!offset_of(i, &offset)) continue;
        LoadEight(w, offset, i % kChunks * 8, x[n]);
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int i = first + n * kWarpgroupThreads;
        if (i < kVectors) StoreQueries<kChunks>(i / kChunks, i % kChunks * 8, x[n]);
      }
    }
  }

  // Eight elements from dim d on of a row of queries.
  __device__ static void LoadEight(const SwapProblem& w, int64_t offset, int d, uint32_t (&x)[4]) {
    const Problem& p = w.p;
    if (w.q_vectors) {
      const uint4 y = *reinterpret_cast<const uint4*>(p.q.data + (offset + d) * 2);
      x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
    } else if (S::kCopied && p.q_pairs) {
      LoadPairs(p, offset, d, x);
    } else {
      LoadElements(p, offset, d, x);
    }
  }

  // As LoadQueries, of heads that are too large for neighbouring lanes: a warp has a row.
  __device__ void LoadQueryRows(const SwapProblem& w, const Cursor& at, int kv_head,
                                int num_rows) const;

  // Asks for the queries of the next sequence, which most likely follow.
  __device__ void PrefetchNextQueries(const Problem& p, const Sequence& s, int kv_head) const {
    const int token = s.first_query + s.num_queries, size = p.q_dtype == p.out_dtype ? 2 : 1;
    constexpr int kLines = S::kDims / 64;  // of a head, of 128 bytes
    const int head = thread() / kLines, line = thread() % kLines * 128;
    if (token >= p.num_tokens || head >= p.group_size || line >= p.k.head_size * size) return;
    const int64_t offset =
        token * p.q.stride_token + (kv_head * p.group_size + head) * p.q.stride_head;
    PrefetchL2(p.q.data + offset * size + line);
  }

  // Stores dims [d, d + 8) of a row of queries in shared memory.
  template <int kChunks>
  __device__ void StoreQueries(int row, int d, uint32_t (&x)[4]) const {
    if constexpr (S::kFp8) {
      const uint32_t block = shared.queries(group) + d / 64 * kRows * S::kRowBytes;
      if constexpr (!std::is_same_v<T, typename S::Out>) {
        const float power = Rescale<kChunks>(x);
        if (d == 0) rows.power[row] = power;
      } else if (d == 0) {
        rows.power[row] = 1.f;
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) StoreShared4(block + SwapQueryOffset(row, d + 2 * n), x[n]);
    } else {
      StoreShared16(RowAddress(row, d), x);
    }
  }

  // Converts a row's bf16 queries to f16; kLanes neighbouring lanes have the row. Returns the power
  // of two that it was divided by.
  template <int kLanes>
  __device__ static float Rescale(uint32_t (&x)[4]) {
    float largest = LargestOf(x);
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, step));
    }
    const float power = PowerOfTwoBelow(largest);  // NaN and infinity stay what they are
    DivideQueries(x, power);
    return power;
  }
  __device__ static float2 QueryPair(uint32_t x) {
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(x));
  }
  // The largest of eight bf16 queries.
  __device__ static float LargestOf(const uint32_t (&x)[4]) {
    float largest = 0.f;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      largest = fmaxf(largest, fmaxf(fabsf(QueryPair(x[n]).x), fabsf(QueryPair(x[n]).y)));
    }
    return largest;
  }
  // Divides them, which makes them f16.
  __device__ static void DivideQueries(uint32_t (&x)[4], float power) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      x[n] = Pack<__half>(QueryPair(x[n]).x / power, QueryPair(x[n]).y / power);
    }
  }

  // Eight 16-bit elements of a row that lies at a multiple of 4 bytes.
  __device__ static void LoadPairs(const Problem& p, int64_t offset, int d, uint32_t (&x)[4]) {
    const auto* from = reinterpret_cast<const uint32_t*>(p.q.data + (offset + d) * 2);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (d + 2 * n < p.k.head_size) x[n] = from[n];
    }
  }

  // Eight elements of a row with any strides and dtype. Not inlined, to keep the usual case short.
  __device__ __noinline__ static void LoadElements(const Problem& p, int64_t offset, int d,
                                                   uint32_t (&x)[4]) {
    auto at = [&](int i) {
      return i < p.k.head_size ? LoadFloat(p.q.data, offset + i * p.q.stride_dim, p.q_dtype) : 0.f;
    };
    for (int n = 0; n < 4; ++n) {
      x[n] = Pack<typename S::Out>(at(d + 2 * n), at(d + 2 * n + 1));
    }
  }

  // Turns dot products into weights, i.e. 2^(score - base), and adds these to the sums.
  __device__ void Weigh(const Problem& p, float (&score)[kRows / 2], int first, bool is_first,
                        uint64_t mask) {
    const bool masked =
        mask != ~uint64_t{0} || first < begin_all || first + kFewKvTileKeys > end_all;
    const int key_row = warp * 16 + (S::kFp8 ? SwapKey(lane / 4) : lane / 4);
#pragma unroll
    for (int e = 0; e < kRows / 2; ++e) {
      if (!S::kPairs) score[e] *= S::kFp8 ? scale * rows.power[RowOf(OwnOf(e))] : scale;
    }
    if constexpr (kRows <= 16) {
      if (!plain || masked) Adjust(p, rows, plain, masked, first, key_row, mask, score);
    } else if (!plain || masked) {
      float adjusted[kRows / 2];  // a copy, so that `score` itself stays in registers
#pragma unroll
      for (int e = 0; e < kRows / 2; ++e) adjusted[e] = score[e];
      AdjustOutOfLine(p, rows, plain, masked, first, key_row, mask, adjusted);
#pragma unroll
      for (int e = 0; e < kRows / 2; ++e) score[e] = adjusted[e];
    }
    bool exceeds = false;
#pragma unroll
    for (int e = 0; e < kRows / 2; ++e) exceeds |= score[e] > limit[OwnOf(e)];
    // At first all do.
    if (is_first || __builtin_expect(AnyOfWarpgroup(group, exceeds), false)) RaiseBases(score);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float base = BaseOf(i);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& x = score[i / 2 * 4 + half * 2 + i % 2];
        x = Exp2(x - base);
        sum[i] += x;
      }
    }
  }

  // Softcap, ALiBi and masks.
  __device__ static void Adjust(const Problem& p, const typename S::Rows& rows, bool plain,
                                bool masked, int first, int key_row, uint64_t mask,
                                float (&score)[kRows / 2]) {
    auto row_of = [](int e) { return e / 4 * 8 + threadIdx.x % 4 * 2 + e % 2; };
    if (!plain) {
#pragma unroll
      for (int e = 0; e < kRows / 2; ++e) {
        const int row = row_of(e), key = first + key_row + e / 2 % 2 * 8;
        score[e] = ScoreOf(p, score[e], rows.slope[row], rows.diagonal[row] - key) * kLog2e;
      }
    }
    if (!masked) return;
#pragma unroll
    for (int e = 0; e < kRows / 2; ++e) {
      const int column = key_row + e / 2 % 2 * 8, key = first + column;
      const KeyRange keys = rows.keys[row_of(e)];
      const bool seen = (mask >> column) & 1 && key >= keys.begin && key < keys.end;
      if (!seen) score[e] = -INFINITY;
    }
  }
  // For many rows, so that the usual step stays short: the code of a loop should fit into the
  // instruction cache.
  __device__ __noinline__ static void AdjustOutOfLine(const Problem& p,
                                                      const typename S::Rows& rows, bool plain,
                                                      bool masked, int first, int key_row,
                                                      uint64_t mask, float (&score)[kRows / 2]) {
    Adjust(p, rows, plain, masked, first, key_row, mask, score);
  }

  // As Problem::Score, without a branch.
  __device__ static float ScoreOf(const Problem& p, float x, float slope, int64_t distance) {
    if (p.softcap > 0.f) x = p.softcap * TanhFromLog2(x * (2.f * kLog2e / p.softcap));
    return x - slope * fabsf(static_cast<float>(distance));
  }

  // Makes the bases the largest scores so far.
  __device__ void RaiseBases(const float (&score)[kRows / 2]) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int e = i / 2 * 4 + i % 2;
      const float high = MaxOfColumn(fmaxf(score[e], score[e + 2]));
      if (lane < 4) rows.exchange[warp][RowOf(i)] = high;
    }
    SyncGroup();
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      float high = row_max(i);
#pragma unroll
      for (int other = 0; other < kSwapGroupWarps; ++other) {
        high = fmaxf(high, rows.exchange[other][RowOf(i)]);
      }
      const float factor = limit[i] == -INFINITY ? 0.f : Exp2(row_max(i) - high);
      limit[i] = high + kSlack;
      sum[i] *= factor;
#pragma unroll
      for (auto& tile : out) {
        const int e = i / 2 * 4 + i % 2;
        tile[e] *= factor, tile[e + 2] *= factor;
      }
    }
  }

  // Writes the weights as [rows, keys].
  __device__ void StoreWeights(const float (&weight)[kRows / 2]) const {
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      const uint32_t pairs[2] = {Pack<T>(weight[4 * n], weight[4 * n + 1]),
                                 Pack<T>(weight[4 * n + 2], weight[4 * n + 3])};
      const int row = n * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
      StoreTurned(shared.weights(group) + row * S::kRowBytes + (chunk ^ row % 8) * 16, pairs);
    }
  }
};

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_TILE_CUH_
