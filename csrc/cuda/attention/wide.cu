// kWide: many queries on Hopper. A block takes 128 query tokens of one head: one warp brings keys
// and values in by TMA, a page a box, and two warpgroups multiply, each with the scores of its next
// keys under way while it weighs the values of the last.
#include "cuda/attention/dispatch.cuh"
#include "cuda/attention/engines.h"
#include "cuda/attention/hopper.cuh"
#include "cuda/attention/mma.cuh"
#include "cuda/attention/tensor_map.h"

namespace flashxla::attention {
namespace {

constexpr int kGroupThreads = 128;  // of a warpgroup
constexpr int kThreads = 3 * kGroupThreads;
[[maybe_unused]] constexpr int kConsumerWarps = 8;
[[maybe_unused]] constexpr int kRowBytes = 128;  // of a row in shared memory
constexpr int kBlockColumns = 64;                // 16-bit elements of it

template <int kDims>
struct Shape {
  static constexpr int kKeys = kDims > 128 ? 64 : 128;
  static constexpr int kStages = kDims > 128 ? 2 : kDims > 64 ? 3 : 4;
  static constexpr int kQueryStages = 1;
  // Queries wait in registers, so that the matrix instructions need not read them again and again.
  static constexpr bool kQueriesInRegisters = kDims <= 128;
  static constexpr int kQueryBytes = kWideQueries * kDims * 2;
  static constexpr int kStageBytes = kKeys * kDims * 2;  // of keys, and of values
  static constexpr int kBarrierBytes = 8 * (2 * kQueryStages + 4 * kStages);
  // The first KB may be lost to alignment.
  static constexpr int kBytes =
      1024 + kQueryStages * kQueryBytes + 2 * kStages * kStageBytes + kBarrierBytes;
};

struct WideProblem {
  CUtensorMap q, k, v;
  Problem p;
  int box_keys;  // keys of a TMA box
};

// A block's tiles, round by round. Rounds run forth and back over the tiles, the most expensive
// first, so that every block gets its share. The next round's is fetched ahead.
struct WideTile {
  int index, head, first_query, begin, end;
  Sequence s;

  __device__ explicit WideTile(const Problem& p) {
    total_ = p.plan.totals[kWide] * p.num_heads;
    next_tile_ = TileOf(p, 0);
    next_ = p.plan.sequences[next_tile_.x];
    after_ = TileOf(p, 1);
  }

  // False: no more tiles.
  __device__ bool Next(const Problem& p) {
    const int item = ItemOf(round_);
    if (item >= total_) return false;
    index = next_tile_.x, head = item % p.num_heads;
    first_query = next_tile_.y * kWideQueries;
    s = next_;
    next_tile_ = after_;
    next_ = p.plan.sequences[next_tile_.x];
    after_ = TileOf(p, ++round_ + 1);
    int unused;
    p.Visible(s, first_query, &begin, &unused);
    p.Visible(s, min(first_query + kWideQueries, s.num_queries) - 1, &unused, &end);
    return true;
  }

 private:
  int round_ = 0, total_;
  int2 next_tile_, after_;  // sequence and tile of rounds round_ and round_ + 1
  Sequence next_;

  __device__ int ItemOf(int round) const {
    const int blocks = gridDim.x;
    const int place = round % 2 ? blocks - 1 - static_cast<int>(blockIdx.x) : blockIdx.x;
    return round * blocks + place;
  }
  __device__ int2 TileOf(const Problem& p, int round) const {
    const int item = ItemOf(round);
    return item < total_ ? p.plan.wide_tiles[item / p.num_heads] : make_int2(0, 0);
  }
};

#if defined(FLASHXLA_HOPPER)

// What lies in shared memory: stages of queries, of keys and of values, and for each of these rings
// a barrier a stage that says it is full, and one that says it is empty.
template <int kDims>
struct SharedView {
  using S = Shape<kDims>;
  uint32_t base, barriers;

  __device__ explicit SharedView(const char* shared) {
    base = (SharedAddress(shared) + 1023) / 1024 * 1024;
    barriers = values(S::kStages);
  }
  __device__ uint32_t queries(int stage) const { return base + stage * S::kQueryBytes; }
  __device__ uint32_t keys(int stage) const {
    return queries(S::kQueryStages) + stage * S::kStageBytes;
  }
  __device__ uint32_t values(int stage) const { return keys(S::kStages + stage); }
  __device__ uint32_t keys_full(int i) const { return barriers + 8 * i; }
  __device__ uint32_t values_full(int i) const { return keys_full(S::kStages + i); }
  __device__ uint32_t keys_empty(int i) const { return keys_full(2 * S::kStages + i); }
  __device__ uint32_t values_empty(int i) const { return keys_full(3 * S::kStages + i); }
  __device__ uint32_t queries_full(int i) const { return keys_full(4 * S::kStages + i); }
  __device__ uint32_t queries_empty(int i) const { return queries_full(S::kQueryStages + i); }
};

// A place in a ring of stages: which, and the parity of its turn.
template <int kStages>
struct Turn {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void Next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// One warp brings in the queries, one the keys and one the values: starting a copy takes its time.
template <int kDims>
__device__ void LoadQueries(const WideProblem& w, const SharedView<kDims>& shared) {
  using S = Shape<kDims>;
  Turn<S::kQueryStages> turn;
  WideTile tile(w.p);
  while (tile.Next(w.p)) {
    const uint32_t full = shared.queries_full(turn.stage);
    WaitBarrier(shared.queries_empty(turn.stage), turn.parity ^ 1);
    if (threadIdx.x % 32 == 0) {
      ArriveExpecting(full, S::kQueryBytes);
      for (int c = 0; c < kDims / kBlockColumns; ++c) {
        LoadBox3(shared.queries(turn.stage) + c * kWideQueries * kRowBytes, &w.q, full,
                 c * kBlockColumns, tile.head, tile.s.first_query + tile.first_query);
      }
    }
    __syncwarp();
    turn.Next();
  }
}

template <int kDims, bool kValues>
__device__ void LoadKeys(const WideProblem& w, const SharedView<kDims>& shared) {
  using S = Shape<kDims>;
  const Problem& p = w.p;
  const int lane = threadIdx.x & 31;
  const int boxes = S::kKeys / w.box_keys;
  const CUtensorMap* map = kValues ? &w.v : &w.k;
  Turn<S::kStages> turn;
  WideTile tile(p);
  while (tile.Next(p)) {
    const int kv_head = tile.head / p.group_size;
    // Where this lane's box of key group n lies. Outside the cache TMA gives zeros.
    auto locate = [&](int n) {
      const int key = n * S::kKeys + lane * w.box_keys;
      if (p.block_table == nullptr) return make_int2(0, tile.s.key_row + key);
      int2 place = make_int2(p.num_blocks, 0);
      if (lane < boxes && key >= 0 && key < tile.s.num_keys) {
        p.Locate(tile.s, tile.index, key, &place.x, &place.y);
      }
      return place;
    };
    const int first = tile.begin / S::kKeys;
    int n = (tile.end + S::kKeys - 1) / S::kKeys - 1;
    int2 place = locate(n);
    for (; n >= first; --n) {
      const int2 next = locate(n - 1);  // early: its table entry takes a while
      const uint32_t to = kValues ? shared.values(turn.stage) : shared.keys(turn.stage);
      const uint32_t full = kValues ? shared.values_full(turn.stage) : shared.keys_full(turn.stage);
      WaitBarrier(kValues ? shared.values_empty(turn.stage) : shared.keys_empty(turn.stage),
                  turn.parity ^ 1);
      if (lane == 0) ArriveExpecting(full, S::kStageBytes);
      __syncwarp();
      if (lane < boxes) {
#pragma unroll
        for (int c = 0; c < kDims / kBlockColumns; ++c) {
          LoadBox4(to + c * S::kKeys * kRowBytes + lane * w.box_keys * kRowBytes, map, full,
                   c * kBlockColumns, kv_head, place.y, place.x);
        }
      }
      turn.Next();
      place = next;
    }
  }
}

// The softmax of a warpgroup's 64 rows. A thread holds parts of two of them.
struct RowState {
  float top[2], sum[2];  // of the raw scores; of this thread's columns
  int begin[2], end[2];
  int begin_all, end_all;
};

template <int kColumns>
__device__ void Softmax(float (&score)[kColumns / 2], RowState& rows, float scale, int first_key,
                        float softcap, bool negative, float (&factor)[2]) {
  const int lane = threadIdx.x & 31;
  if (negative) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) score[i] = -score[i];
  }
  if (softcap > 0.f) {  // scale is then that of the capped score
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      // tanh(x) = 1 - 2 / (1 + e^2x), to 1e-7.
      score[i] = 1.f - __fdividef(2.f, 1.f + Exp2(score[i] * softcap));
    }
  }
  // Compared with constants: columns of this thread start at its own place.
  const int offset = first_key + lane % 4 * 2;
  if (first_key + kColumns > rows.end_all) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      if (i / 4 * 8 + i % 2 >= rows.end[i / 2 % 2] - offset) score[i] = -INFINITY;
    }
  }
  if (first_key < rows.begin_all) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      if (i / 4 * 8 + i % 2 < rows.begin[i / 2 % 2] - offset) score[i] = -INFINITY;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float top = rows.top[r];
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i) {
      top = fmaxf(top, fmaxf(score[i * 4 + 2 * r], score[i * 4 + 2 * r + 1]));
    }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const float base = top == -INFINITY ? 0.f : top * scale;
    factor[r] = Exp2(rows.top[r] * scale - base);
    rows.top[r] = top;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& x = score[i * 4 + 2 * r + j];
        x = Exp2(fmaf(x, scale, -base));
        sum += x;
      }
    }
    rows.sum[r] = rows.sum[r] * factor[r] + sum;
  }
}

template <typename T, int kDims>
__device__ void Consume(const WideProblem& w, const SharedView<kDims>& shared) {
  using S = Shape<kDims>;
  constexpr int kKeys = S::kKeys;
  // The warpgroups take turns at the tensor cores.
  constexpr bool kTurns = kDims >= 128;
  constexpr int kTurnBarrier = 2, kZeroBarrier = 1;
  const Problem& p = w.p;
  const int lane = threadIdx.x & 31;
  const int group = threadIdx.x / kGroupThreads - 1;
  const int row0 = group * 64 + threadIdx.x % kGroupThreads / 32 * 16 + lane / 4;
  Turn<S::kStages> keys, values;
  Turn<S::kQueryStages> queries;
  if (kTurns && group == 1) ArriveNamed(kTurnBarrier, 2 * kGroupThreads);

  WideTile tile(p);
  while (tile.Next(p)) {
    const Sequence& s = tile.s;
    const int kv_head = tile.head / p.group_size;
    float scale = p.ScoreScale(tile.index, kv_head), softcap = 0.f;
    const bool negative = scale < 0.f;
    scale = fabsf(scale);
    if (p.softcap > 0.f) softcap = 2.f * kLog2e * scale / p.softcap, scale = p.softcap;
    // Not 0, which would make NaN of the -inf of a masked score.
    scale = fmaxf(scale * kLog2e, 1e-30f);
    RowState rows;
    const int last_query = s.num_queries - 1;
    int unused;
    p.Visible(s, min(tile.first_query + group * 64, last_query), &unused, &rows.end_all);
    p.Visible(s, min(tile.first_query + group * 64 + 63, last_query), &rows.begin_all, &unused);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Rows behind the sequence's last are computed like it and not stored.
      p.Visible(s, min(tile.first_query + row0 + 8 * r, last_query), &rows.begin[r], &rows.end[r]);
      rows.top[r] = -INFINITY, rows.sum[r] = 0.f;
    }
    float out[kDims / 2], score[kKeys / 2], factor[2];
    uint32_t weights[kKeys / 16][4];
#pragma unroll
    for (int i = 0; i < kDims / 2; ++i) out[i] = 0.f;

    uint32_t queries_of_warp[S::kQueriesInRegisters ? kDims / 16 : 1][4];
    auto start_scores = [&](int stage) {
      FenceMatrix();
#pragma unroll
      for (int k = 0; k < kDims / 16; ++k) {
        const int block = k / 4, step = k % 4 * 32;
        const uint64_t b =
            MatrixDescriptor(shared.keys(stage) + block * kKeys * kRowBytes + step, 0);
        if constexpr (S::kQueriesInRegisters) {
          Matrix<T, kKeys>::Scores(score, queries_of_warp[k], b, k > 0);
        } else {
          Matrix<T, kKeys>::Scores(
              score,
              MatrixDescriptor(shared.queries(queries.stage) + block * kWideQueries * kRowBytes +
                                   group * 64 * kRowBytes + step,
                               0),
              b, k > 0);
        }
      }
      CommitMatrix();
    };
    auto start_values = [&](int stage) {
      FenceMatrix();
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k) {
        Matrix<T, kDims>::Values(
            out, weights[k],
            MatrixDescriptor(shared.values(stage) + k * 16 * kRowBytes, kKeys * kRowBytes));
      }
      CommitMatrix();
    };
    // Values of keys that are not there may be anything, and 0 times it is not always 0.
    auto wait_values = [&](int n) {
      WaitBarrier(shared.values_full(values.stage), values.parity);
      const int low = max(s.first_key - n * kKeys, 0), high = min(s.num_keys - n * kKeys, kKeys);
      if (low == 0 && high == kKeys) return;
      const int thread = threadIdx.x - kGroupThreads;
      const int missing = low + kKeys - high;
      constexpr int kVectors = kRowBytes / 16;
      for (int i = thread; i < missing * kVectors * (kDims / kBlockColumns);
           i += 2 * kGroupThreads) {
        int key = i / kVectors % missing;
        if (key >= low) key += high - low;
        const int block = i / kVectors / missing;
        const uint32_t to = shared.values(values.stage) + block * kKeys * kRowBytes +
                            key * kRowBytes + i % kVectors * 16;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
      }
      FenceProxy();
      SyncNamed(kZeroBarrier, 2 * kGroupThreads);
    };
    auto release = [&](uint32_t barrier) {
      if (lane == 0) Arrive(barrier);
    };
    auto weigh = [&] {
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          weights[k][i] = Pack<T>(score[k * 8 + 2 * i], score[k * 8 + 2 * i + 1]);
        }
      }
    };

    const int first = tile.begin / kKeys;
    int n = (tile.end + kKeys - 1) / kKeys - 1;
    WaitBarrier(shared.queries_full(queries.stage), queries.parity);
    if constexpr (S::kQueriesInRegisters) {
      const int row = row0 - lane / 4 + lane % 16;
#pragma unroll
      for (int k = 0; k < kDims / 16; ++k) {
        const int chunk = k % 4 * 2 + lane / 16;
        LoadMatrices(queries_of_warp[k], shared.queries(queries.stage) +
                                             k / 4 * kWideQueries * kRowBytes + row * kRowBytes +
                                             (chunk ^ row % 8) * 16);
      }
      release(shared.queries_empty(queries.stage));
    }
    if (n >= first) {
      WaitBarrier(shared.keys_full(keys.stage), keys.parity);
      if (kTurns) SyncNamed(kTurnBarrier + group, 2 * kGroupThreads);
      start_scores(keys.stage);
      if (kTurns) ArriveNamed(kTurnBarrier + 1 - group, 2 * kGroupThreads);
      WaitMatrix<0>();
      Pin(score);
      release(shared.keys_empty(keys.stage));
      keys.Next();
      Softmax<kKeys>(score, rows, scale, n * kKeys, softcap, negative, factor);
      weigh();
      for (--n; n >= first; --n) {
        WaitBarrier(shared.keys_full(keys.stage), keys.parity);
        wait_values(n + 1);
        if (kTurns) SyncNamed(kTurnBarrier + group, 2 * kGroupThreads);
        start_scores(keys.stage);
        start_values(values.stage);
        if (kTurns) ArriveNamed(kTurnBarrier + 1 - group, 2 * kGroupThreads);
        WaitMatrix<1>();
        Pin(score);
        release(shared.keys_empty(keys.stage));
        keys.Next();
        Softmax<kKeys>(score, rows, scale, n * kKeys, softcap, negative, factor);
        WaitMatrix<0>();
        Pin(out);
        release(shared.values_empty(values.stage));
        values.Next();
#pragma unroll
        for (int i = 0; i < kDims / 2; ++i) out[i] *= factor[i / 2 % 2];
        weigh();
      }
      if (!S::kQueriesInRegisters) release(shared.queries_empty(queries.stage));
      wait_values(first);
      start_values(values.stage);
      WaitMatrix<0>();
      Pin(out);
      release(shared.values_empty(values.stage));
      values.Next();
    } else if (!S::kQueriesInRegisters) {
      release(shared.queries_empty(queries.stage));
    }
    queries.Next();

    const float value_scale = p.ValueScale(tile.index, kv_head);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = rows.sum[r];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int query = tile.first_query + row0 + 8 * r;
      if (query > last_query) continue;
      const int token = s.first_query + query;
      const float2 end = FinishRow(rows.top[r] * scale, sum, p.Sink(tile.head));
      if (lane % 4 == 0) p.StoreLse(token, tile.head, end.y);
      const float whole = end.x * value_scale;
      T* to = reinterpret_cast<T*>(p.out.data) + token * p.out.stride_token +
              tile.head * p.out.stride_head;
#pragma unroll
      for (int i = 0; i < kDims / 8; ++i) {
        const int d = i * 8 + lane % 4 * 2;
        if (d < p.head_size) {
          *reinterpret_cast<uint32_t*>(to + d) =
              Pack<T>(out[i * 4 + 2 * r] * whole, out[i * 4 + 2 * r + 1] * whole);
        }
      }
    }
  }
}

#endif  // FLASHXLA_HOPPER

template <typename T, int kDims>
__global__ void __launch_bounds__(kThreads, 1) WideKernel(const __grid_constant__ WideProblem w) {
#if defined(FLASHXLA_HOPPER)
  using S = Shape<kDims>;
  extern __shared__ char memory[];
  const SharedView<kDims> shared(memory);
  AllowNext();
  AwaitPrevious();
  if (static_cast<int>(blockIdx.x) >= w.p.plan.totals[kWide] * w.p.num_heads) return;
  if (threadIdx.x == 0) {
    PrefetchMap(&w.q);
    PrefetchMap(&w.k);
    PrefetchMap(&w.v);
    for (int i = 0; i < S::kQueryStages; ++i) {
      InitBarrier(shared.queries_full(i), 1);
      InitBarrier(shared.queries_empty(i), kConsumerWarps);
    }
    for (int i = 0; i < S::kStages; ++i) {
      InitBarrier(shared.keys_full(i), 1);
      InitBarrier(shared.values_full(i), 1);
      InitBarrier(shared.keys_empty(i), kConsumerWarps);
      InitBarrier(shared.values_empty(i), kConsumerWarps);
    }
    FenceProxy();
  }
  __syncthreads();
  if (threadIdx.x < kGroupThreads) {
    LowerRegisters<24>();
    const int warp = threadIdx.x / 32;
    if (warp == 0) LoadKeys<kDims, false>(w, shared);
    if (warp == 1) LoadKeys<kDims, true>(w, shared);
    if (warp == 2) LoadQueries<kDims>(w, shared);
  } else {
    RaiseRegisters<240>();
    Consume<T, kDims>(w, shared);
  }
#endif
}

int BoxKeys(const Problem& p) {
  const int keys = p.head_size > 128 ? 64 : 128;
  if (p.block_table == nullptr) return keys;
  int box = keys;  // a power of two: the largest that divides the page
  while (p.block_size % box != 0) box /= 2;
  return box;
}

bool MapQueries(const Problem& p, CUtensorMap* map) {
  const int64_t sizes[3] = {p.head_size, p.num_heads, p.num_tokens};
  const int64_t strides[3] = {1, p.q.stride_head, p.q.stride_token};
  const int box[3] = {kBlockColumns, 1, kWideQueries};
  return MakeTensorMap(p.q.data, p.q_dtype, 3, sizes, strides, box, map);
}

// TMA takes strides of at least one element, and below 2^40 bytes.
bool TakesStride(int64_t size, int64_t stride) {
  return size <= 1 || (stride > 0 && stride < (int64_t{1} << 39));
}

bool TakesStrides(const Problem& p, const Cache& c) {
  return TakesStride(p.num_kv_heads, c.stride_head) && TakesStride(p.block_size, c.stride_token) &&
         TakesStride(p.num_blocks, c.stride_block);
}

bool Vectors(const Rows& r) {
  return r.stride_dim == 1 && r.stride_token % 8 == 0 && r.stride_head % 8 == 0 &&
         reinterpret_cast<uintptr_t>(r.data) % 16 == 0;
}

}  // namespace

const char* WhyNotWide(const Problem& p) {
  if (!LoadedImage().hopper) return WhyNoHopper();
  if (p.q_dtype != FLASHXLA_BF16 && p.q_dtype != FLASHXLA_F16) return "queries are not 16-bit";
  if (p.kv_dtype != p.q_dtype) return "keys are not of the queries' dtype";
  if (p.head_size % 8 != 0) return "the head size is no multiple of 8";
  if (p.alibi_slopes.data != nullptr) return "ALiBi";
  if (p.block_table != nullptr && p.block_size % 8 != 0) return "the page size is no multiple of 8";
  if (!p.kv_vectors || !Vectors(p.q)) return "strides or addresses are no multiples of 16 bytes";
  if (!TakesStrides(p, p.k) || !TakesStrides(p, p.v) ||
      !TakesStride(p.num_heads, p.q.stride_head) || !TakesStride(p.num_tokens, p.q.stride_token)) {
    return "strides that TMA cannot take";
  }
  if (!p.out_pairs) return "out's strides";
  if (p.num_blocks == 0 || p.block_size == 0) return "there are no keys";
  return "";
}

bool LaunchWide(const Problem& p, cudaStream_t stream) {
  WideProblem w = {};
  w.p = p;
  w.box_keys = BoxKeys(p);
  if (!MapQueries(p, &w.q) || !MapCache(p, p.k, kBlockColumns, w.box_keys, &w.k) ||
      !MapCache(p, p.v, kBlockColumns, w.box_keys, &w.v)) {
    return false;
  }
  WithInstance(p.out_dtype, p.head_size, false, [&](auto t, auto dims, auto is_fp8) {
    if constexpr (!decltype(is_fp8)::value) {
      using T = typename decltype(t)::type;
      constexpr int kDims = decltype(dims)::value;
      auto* kernel = WideKernel<T, kDims>;
      constexpr int kBytes = Shape<kDims>::kBytes;
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
      LaunchEarly(kernel, NumMultiprocessors(), kThreads, kBytes, stream, w);
    }
  });
  return true;
}

}  // namespace flashxla::attention
