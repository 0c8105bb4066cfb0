// wide: many queries on Hopper. A thread block computes q tiles of one head.
// The producer warps load by TMA (wide_load.cuh), or row by row where pages are small
// (wide_gather.cuh), and convert fp8 keys (wide_fp8.cuh). Two or three consumer
// warpgroups, of 64 query tokens each, multiply: they overlap the scores of the next kv tile with
// the softmax and values of the last.
#include <algorithm>

#include "common/tensor_view.h"
#include "cuda/attention/dispatch.cuh"
#include "cuda/attention/engines.h"
#include "cuda/attention/flag.cuh"
#include "cuda/attention/matrix_product.cuh"
#include "cuda/attention/tensor_map.h"
#include "cuda/attention/warp.cuh"
#include "cuda/attention/wide_fp8.cuh"
#include "cuda/attention/wide_gather.cuh"
#include "cuda/attention/wide_load.cuh"
#include "cuda/attention/wide_plan.cuh"
#include "cuda/call_tag.h"

namespace flashxla::attention {
namespace {

#if defined(FLASHXLA_HOPPER)

// The softmax state of a warpgroup's 64 rows. A thread holds parts of two rows.
struct RowState {
  float row_max[2], row_sum[2];  // of the unscaled scores; of this thread's columns
  int begin[2], end[2];          // keys that each row sees
  int begin_all, end_all;        // keys that all 64 rows see
  int diagonal;                  // position of the first of the two rows among the keys

  // For rows row0 and row0 + 8 of a q tile, which are part of warpgroup `group`.
  __device__ RowState(const Problem& p, const ManyTile& tile, int group, int row0) {
    const Sequence& s = tile.s;
    const int last_query = s.num_queries - 1;
    const int group_query = tile.first_query + group * 64;
    begin_all = p.Visible(s, min(group_query + 63, last_query)).begin;
    end_all = p.Visible(s, min(group_query, last_query)).end;
    diagonal = tile.first_query + row0 + (s.length - s.num_queries);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Rows past the sequence's last repeat its mask. They are computed but not stored.
      const KeyRange keys = p.Visible(s, min(tile.first_query + row0 + 8 * r, last_query));
      begin[r] = keys.begin, end[r] = keys.end;
      row_max[r] = -INFINITY, row_sum[r] = 0.f;
    }
  }
};

// How the products of a q tile's rows become scores, in log2: times `scale`, after the softcap and
// ALiBi's slope.
struct ScoreRule {
  float scale, softcap, slope;
  bool negative;

  __device__ ScoreRule(const Problem& p, const ManyTile& tile) {
    scale = p.ScoreScale(tile.index, tile.kv_head), softcap = 0.f;
    negative = scale < 0.f;  // then it is the queries that are negated
    scale = fabsf(scale);
    // Neither is 0: 0 times the -inf of a masked score is NaN, and a softcap of 0 is none.
    constexpr float kLeast = 1e-30f;
    if (p.softcap > 0.f) {
      softcap = fmaxf(2.f * kLog2e * scale / p.softcap, kLeast), scale = p.softcap;
    }
    scale = fmaxf(scale * kLog2e, kLeast);
    slope = p.alibi_slopes.at(tile.index, tile.head, 0.f) * kLog2e;
  }
  // What the scores that OnlineSoftmax leaves are still to be multiplied by.
  template <bool kAlibi>
  __device__ float rest() const {
    return kAlibi && slope != 0.f ? 1.f : scale;
  }
};

// ptxas moves a wait for matrix instructions up, in front of arithmetic that is there to overlap
// with them. A branch that depends on the arithmetic keeps it above. It is never taken: a sum of
// weights is not negative.
__device__ inline void KeepAbove(float sum) {
  asm volatile(
      "{\n"
      ".reg .pred never;\n"
      "again:\n"
      "setp.lt.f32 never, %0, 0f00000000;\n"
      "@!never bra done;\n"
      "nanosleep.u32 20;\n"
      "bra again;\n"
      "done:\n"
      "}\n" ::"f"(sum));
}

// Turns scores into weights, 2^kLift times as large.
template <typename S, int kLift>
__device__ void OnlineSoftmax(float (&score)[S::kKeys / 2], RowState& rows, const ScoreRule& rule,
                              int first_key, float (&factor)[2]) {
  constexpr int kColumns = S::kKeys;
  constexpr bool kAlibi = S::kAlibi;
  const int lane = threadIdx.x & 31;
  if (S::kSoftcap && rule.softcap > 0.f) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) score[i] *= rule.softcap;
    if (first_key + kColumns > rows.end_all || first_key < rows.begin_all) {
      // Keys that do not exist may be NaN, so each score is computed by itself.
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) score[i] = TanhFromLog2(score[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kColumns / 2; i += i % 4 == 0 ? 2 : 6) {  // four of a row
        TanhFromLog2(score[i], score[i + 1], score[i + 4], score[i + 5]);
      }
    }
  }
  const float scale = rule.rest<kAlibi>();
  if (kAlibi && rule.slope != 0.f) {
    // A difference of two positions, which integers hold exactly, of less than 2^24 in most calls.
    const float distance = static_cast<float>(rows.diagonal - first_key - lane % 4 * 2);
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const float d = distance + static_cast<float>(i / 2 % 2 * 8 - (i / 4 * 8 + i % 2));
      score[i] = fmaf(score[i], rule.scale, -rule.slope * fabsf(d));
    }
  }
  // Relative to this thread's first column, so that its columns are compile-time constants.
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
    float row_max = rows.row_max[r];
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i) {
      row_max = fmaxf(row_max, fmaxf(score[i * 4 + 2 * r], score[i * 4 + 2 * r + 1]));
    }
    row_max = fmaxf(row_max, __shfl_xor_sync(kAllLanes, row_max, 1));
    row_max = fmaxf(row_max, __shfl_xor_sync(kAllLanes, row_max, 2));
    const float base = row_max == -INFINITY ? 0.f : row_max * scale;
    factor[r] = Exp2(rows.row_max[r] * scale - base);
    const float lifted = kLift > 0 ? kLift - base : -base;
    rows.row_max[r] = row_max;
    float row_sum = 0.f;
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& x = score[i * 4 + 2 * r + j];
        x = Exp2(fmaf(x, scale, lifted));
        row_sum += x;
      }
    }
    rows.row_sum[r] = rows.row_sum[r] * factor[r] + row_sum;
  }
}

// Four lanes that have x[j] of column j each exchange them: each gets a row, x[i] of lane i.
__device__ inline void TransposeQuad(uint32_t (&x)[4]) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool high = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      uint32_t &low_word = x[i], &high_word = x[i + step];
      const uint32_t other = __shfl_xor_sync(kAllLanes, high ? low_word : high_word, step);
      (high ? low_word : high_word) = other;
    }
  }
}

// Normalizes and writes rows row0 and row0 + 8 of a q tile.
template <typename T, int kDims, int kLift>
__device__ void StoreRows(const Problem& p, const ManyTile& tile, int row0, const RowState& rows,
                          float scale, const float (&out)[kDims / 2]) {
  const int lane = threadIdx.x & 31;
  constexpr float kLower = 1.f / (1 << kLift);
  const float value_scale = p.ValueScale(tile.index, tile.kv_head) * kLower;
  const float sink = p.Sink(tile.head);
  bool exists[2];
  float whole[2];
  T* to[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float row_sum = rows.row_sum[r];
    row_sum += __shfl_xor_sync(kAllLanes, row_sum, 1);
    row_sum += __shfl_xor_sync(kAllLanes, row_sum, 2);
    const int query = tile.first_query + row0 + 8 * r, token = tile.s.first_query + query;
    exists[r] = query < tile.s.num_queries;
    const RowEnd end = {rows.row_max[r] * scale, row_sum * kLower, sink};
    if (exists[r] && lane % 4 == 0) p.StoreLse(token, tile.head, end);
    whole[r] = end.Factor() * value_scale;
    to[r] = reinterpret_cast<T*>(p.out.data) + token * p.out.stride_token +
            tile.head * p.out.stride_head;
  }
  // A lane has 2 of each 8 columns. After the exchange it stores all 8, since the number of stores
  // counts: each takes a cycle for each row.
#pragma unroll
  for (int i = 0; i < kDims / 8; i += 4) {
    const int d = (i + lane % 4) * 8;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* pair = &out[(i + j) * 4 + 2 * r];
        x[j] = Pack<T>(pair[0] * whole[r], pair[1] * whole[r]);
      }
      TransposeQuad(x);
      if (exists[r] && d < p.head_size) {
        *reinterpret_cast<uint4*>(to[r] + d) = make_uint4(x[0], x[1], x[2], x[3]);
      }
    }
  }
}

// Results of parts of a q tile, as a warpgroup has them in its registers.
template <typename S, int kDims>
struct WideParts {
  const WideProblem& w;
  int first, each;  // where those of part 0 are, and from one part to the next

  __device__ WideParts(const WideProblem& problem, const ManyTile& tile, int group)
      : w(problem),
        first(((tile.partial - tile.part) * w.p.num_heads + tile.head) * S::kConsumers + group),
        each(w.p.num_heads * S::kConsumers) {}

  // Writes the result of this part.
  __device__ void Store(int part, int barrier, const RowState& rows,
                        const float (&out)[kDims / 2]) const {
    float4* to = Vectors(part);
#pragma unroll
    for (int i = 0; i < kDims / 8; ++i) {
      const float* x = &out[i * 4];
      to[i * kWarpgroupThreads] = make_float4(x[0], x[1], x[2], x[3]);
    }
    to[kDims / 8 * kWarpgroupThreads] =
        make_float4(rows.row_max[0], rows.row_max[1], rows.row_sum[0], rows.row_sum[1]);
    SyncNamed(barrier, kWarpgroupThreads);
    if (thread() == 0) SetFlag(Flag(part), w.tag);
  }

  // Adds the results of the `count` other parts to that of the last one. scale: see ScoreRule.
  __device__ void Add(int count, int barrier, float scale, RowState& rows,
                      float (&out)[kDims / 2]) const {
    if (thread() < count) AwaitFlag(Flag(thread()), w.tag);
    SyncNamed(barrier, kWarpgroupThreads);
#pragma unroll 1
    for (int part = 0; part < count; ++part) {
      // Past L1, where another block's results may be missing.
      const float4* from = Vectors(part);
      const float4 ends = __ldcg(&from[kDims / 8 * kWarpgroupThreads]);
      const float other_max[2] = {ends.x, ends.y}, other_sum[2] = {ends.z, ends.w};
      float own[2], other[2];  // factors
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float row_max = fmaxf(rows.row_max[r], other_max[r]);
        const float base = row_max == -INFINITY ? 0.f : row_max * scale;
        own[r] = Exp2(rows.row_max[r] * scale - base), other[r] = Exp2(other_max[r] * scale - base);
        rows.row_max[r] = row_max;
        rows.row_sum[r] = rows.row_sum[r] * own[r] + other_sum[r] * other[r];
      }
#pragma unroll
      for (int i = 0; i < kDims / 8; ++i) {
        const float4 x = __ldcg(&from[i * kWarpgroupThreads]);
        float* to = &out[i * 4];
        to[0] = to[0] * own[0] + x.x * other[0], to[1] = to[1] * own[0] + x.y * other[0];
        to[2] = to[2] * own[1] + x.z * other[1], to[3] = to[3] * own[1] + x.w * other[1];
      }
    }
  }

 private:
  __device__ static int thread() { return threadIdx.x % kWarpgroupThreads; }
  __device__ uint64_t* Flag(int part) const { return w.flags + first + part * each; }
  // This thread's.
  __device__ float4* Vectors(int part) const {
    const int64_t place = first + part * each;
    return w.partials + place * WidePartialVectors(kDims) * kWarpgroupThreads + thread();
  }
};

// Flips the signs of 16 bytes in shared memory.
template <uint32_t kSigns>
__device__ void NegateVector(uint32_t at) {
  asm volatile(
      "{.reg .b32 a, b, c, d; ld.shared.v4.b32 {a, b, c, d}, [%0]; xor.b32 a, a, %1; "
      "xor.b32 b, b, %1; xor.b32 c, c, %1; xor.b32 d, d, %1; st.shared.v4.b32 [%0], {a, b, c, "
      "d};}" ::"r"(at),
      "n"(kSigns)
      : "memory");
}

// The consumer warpgroups. Product: what the products of queries and keys take.
template <typename Product, typename Out, int kDims, typename S>
__device__ void Consume(const WideProblem& w, const WideShared<S>& shared) {
  constexpr int kKeys = S::kKeys;
  constexpr int kLift = S::kDirect ? 0 : kLiftLog2;
  // Of weights and values. float16 holds all fp8 numbers, and takes half as long to widen to.
  using Weight = std::conditional_t<S::kWidened, __half, Product>;
  // A matrix instruction sums over 32 bytes: of dims for scores, of keys for values.
  constexpr int kStepElements = 32 / S::kElementBytes;
  constexpr int kDimSteps = kDims / kStepElements, kKeySteps = kKeys / kStepElements;
  // The warpgroups take turns at the tensor cores: one multiplies during the other's softmax.
  constexpr bool kTurns = kDims >= 128;
  static_assert(!kTurns || S::kConsumers == 2);
  // Without turns, a warpgroup's softmax is to overlap with its own products of values.
  constexpr bool kOverlap = !kTurns && S::kDirect;
  // Asks first whether sums are to be scaled at all.
  constexpr bool kAsks = kOverlap || S::kFp8;
  constexpr int kTurnBarrier = 2, kZeroBarrier = 1, kGroupBarrier = 4;
  constexpr uint32_t kSigns = S::kFp8 ? 0x80808080 : 0x80008000;  // of the queries in 32 bits
  const Problem& p = w.p;
  const int lane = threadIdx.x & 31;
  const int thread = threadIdx.x - S::kProducerThreads, group = thread / kWarpgroupThreads;
  const int row0 = group * 64 + threadIdx.x % kWarpgroupThreads / 32 * 16 + lane / 4;
  PipelineState<S::kStages> keys;
  PipelineState<S::kValueStages> values;
  PipelineState<S::kQueryStages> queries;
  if (kTurns && group == 1) ArriveNamed(kTurnBarrier, 2 * kWarpgroupThreads);

  WideTiles<S> tiles(shared);
  for (ManyTile tile; tiles.Next(&tile); tiles.Done()) {
    const Sequence& s = tile.s;
    const ScoreRule rule(p, tile);
    RowState rows(p, tile, group, row0);
    float out[kDims / 2], score[kKeys / 2], factor[2];
    uint32_t weights[kKeySteps][4];
#pragma unroll
    for (int i = 0; i < kDims / 2; ++i) out[i] = 0.f;

    uint32_t q_fragments[S::kQueriesInRegisters ? kDimSteps : 1][4];
    auto start_scores = [&](int stage) {
      FenceMatrix();
#pragma unroll
      for (int k = 0; k < kDimSteps; ++k) {
        const int block = k / 4, step = k % 4 * 32;
        const uint64_t b =
            MatrixDescriptor(shared.keys(stage) + block * kKeys * kWideRowBytes + step, 0);
        if constexpr (S::kQueriesInRegisters) {
          MatrixProduct<Product, kKeys>::Start(score, q_fragments[k], b, k > 0);
        } else {
          MatrixProduct<Product, kKeys>::Start(
              score,
              MatrixDescriptor(shared.queries(queries.stage) +
                                   block * S::kQTileTokens * kWideRowBytes +
                                   group * 64 * kWideRowBytes + step,
                               0),
              b, k > 0);
        }
      }
      CommitMatrix();
    };
    auto start_values = [&](int stage) {
      FenceMatrix();
#pragma unroll
      for (int k = 0; k < kKeySteps; ++k) {
        const uint32_t step = shared.values(stage) + k * (S::kFp8 ? 32 : 16 * kWideRowBytes);
        MatrixProduct<Weight, kDims>::template Start<!S::kFp8>(
            out, weights[k], MatrixDescriptor(step, S::kFp8 ? 0 : kKeys * kWideRowBytes), true);
      }
      CommitMatrix();
    };
    // Waits for kv tile n's values, and zeroes those of keys that do not exist: they may hold NaN,
    // and 0 times NaN is not 0. (Who turned values did that.)
    auto wait_values = [&](int n) {
      WaitBarrier(shared.values_full(values.stage), values.parity);
      if constexpr (S::kFp8) return;
      const int low = max(s.first_key - n * kKeys, 0), high = min(s.num_keys - n * kKeys, kKeys);
      if (low == 0 && high == kKeys) return;
      const int missing = low + kKeys - high;
      constexpr int kVectors = kWideRowBytes / 16;
      for (int i = thread; i < missing * kVectors * S::kBlocks; i += S::kConsumerThreads) {
        int key = i / kVectors % missing;
        if (key >= low) key += high - low;
        const int block = i / kVectors / missing;
        const uint32_t to = shared.values(values.stage) + block * kKeys * kWideRowBytes +
                            key * kWideRowBytes + i % kVectors * 16;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
      }
      FenceProxy();
      SyncNamed(kZeroBarrier, S::kConsumerThreads);
    };
    auto pack_weights = [&] {
#pragma unroll
      for (int k = 0; k < kKeySteps; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (S::kFp8) {
            const float* x = &score[k * 16 + i / 2 * 8 + i % 2 * 2];
            weights[k][i] = PackFp8(x[0], x[1], x[4], x[5]);
          } else {
            weights[k][i] = Pack<Weight>(score[k * 8 + 2 * i], score[k * 8 + 2 * i + 1]);
          }
        }
      }
    };

    const int first = tile.begin / kKeys;
    int n = (tile.end + kKeys - 1) / kKeys - 1;
    WaitBarrier(shared.queries_full(queries.stage), queries.parity);
    if constexpr (S::kQueriesInRegisters) {
      const int row = row0 - lane / 4 + lane % 16;
#pragma unroll
      for (int k = 0; k < kDimSteps; ++k) {
        const int chunk = k % 4 * 2 + lane / 16;
        LoadMatrices(q_fragments[k], shared.queries(queries.stage) +
                                         k / 4 * S::kQTileTokens * kWideRowBytes +
                                         row * kWideRowBytes + (chunk ^ row % 8) * 16);
        if (rule.negative) {
#pragma unroll
          for (int i = 0; i < 4; ++i) q_fragments[k][i] ^= kSigns;
        }
      }
      Release(shared.queries_empty(queries.stage));
    } else if (rule.negative) {
      for (int i = threadIdx.x % kWarpgroupThreads; i < 64 * S::kBlocks * kWideRowBytes / 16;
           i += kWarpgroupThreads) {
        constexpr int kVectors = 64 * kWideRowBytes / 16;  // of a warpgroup, in a block of columns
        NegateVector<kSigns>(shared.queries(queries.stage) +
                             i / kVectors * S::kQTileTokens * kWideRowBytes +
                             (group * kVectors + i % kVectors) * 16);
      }
      FenceProxy();
      SyncNamed(kGroupBarrier + group, kWarpgroupThreads);
    }
    const int group_query = tile.first_query + group * 64;
    // A warpgroup without rows. Where q tiles are short and many, that is not worth the question.
    const bool idle = (S::kConsumers > 2 || S::kDivides) && group_query >= s.num_queries;
    if constexpr (S::kConsumers > 2 || S::kDivides) {
      // Of kv tiles that none of its rows sees a warpgroup only says that it is done with them, and
      // passes its turn on. Those that take turns do so only where they have no rows at all.
      int end = idle ? 0 : tile.end;
      if (!kTurns && !idle) end = p.Visible(s, min(group_query + 63, s.num_queries - 1)).end;
      for (; n >= first && n * kKeys >= end; --n) {
        WaitBarrier(shared.keys_full(keys.stage), keys.parity);
        if (kTurns) {
          SyncNamed(kTurnBarrier + group, 2 * kWarpgroupThreads);
          ArriveNamed(kTurnBarrier + 1 - group, 2 * kWarpgroupThreads);
        }
        Release(shared.keys_empty(keys.stage));
        keys.Next();
        wait_values(n);
        Release(shared.values_empty(values.stage));
        values.Next();
      }
    }
    if (n >= first) {
      WaitBarrier(shared.keys_full(keys.stage), keys.parity);
      if (kTurns) SyncNamed(kTurnBarrier + group, 2 * kWarpgroupThreads);
      start_scores(keys.stage);
      if (kTurns) ArriveNamed(kTurnBarrier + 1 - group, 2 * kWarpgroupThreads);
      WaitMatrix<0>();
      Pin(score);
      Release(shared.keys_empty(keys.stage));
      keys.Next();
      OnlineSoftmax<S, kLift>(score, rows, rule, n * kKeys, factor);
      pack_weights();
      for (--n; n >= first; --n) {
        WaitBarrier(shared.keys_full(keys.stage), keys.parity);
        wait_values(n + 1);
        if (kTurns) SyncNamed(kTurnBarrier + group, 2 * kWarpgroupThreads);
        start_scores(keys.stage);
        start_values(values.stage);
        if (kTurns) ArriveNamed(kTurnBarrier + 1 - group, 2 * kWarpgroupThreads);
        WaitMatrix<1>();
        Pin(score);
        Release(shared.keys_empty(keys.stage));
        keys.Next();
        OnlineSoftmax<S, kLift>(score, rows, rule, n * kKeys, factor);
        if (kOverlap) KeepAbove(fminf(rows.row_sum[0], rows.row_sum[1]));
        WaitMatrix<0>();
        Pin(out);
        Release(shared.values_empty(values.stage));
        values.Next();
        // The largest score seldom changes after a row's first keys.
        if (!kAsks || __any_sync(kAllLanes, factor[0] != 1.f || factor[1] != 1.f)) {
#pragma unroll
          for (int i = 0; i < kDims / 2; ++i) out[i] *= factor[i / 2 % 2];
        }
        pack_weights();
      }
      if (!S::kQueriesInRegisters) Release(shared.queries_empty(queries.stage));
      wait_values(first);
      start_values(values.stage);
      WaitMatrix<0>();
      Pin(out);
      Release(shared.values_empty(values.stage));
      values.Next();
    } else if (!S::kQueriesInRegisters) {
      Release(shared.queries_empty(queries.stage));
    }
    queries.Next();

    tile = tiles.Read();
    const float scale = rule.template rest<S::kAlibi>();
    if constexpr (S::kDivides) {
      if (idle) continue;
      const WideParts<S, kDims> parts(w, tile, group);
      if (tile.part + 1 < tile.num_parts) parts.Store(tile.part, kGroupBarrier + group, rows, out);
      if (tile.part + 1 != tile.num_parts) continue;
      if (tile.part > 0) parts.Add(tile.part, kGroupBarrier + group, scale, rows, out);
    }
    StoreRows<Out, kDims, kLift>(p, tile, row0, rows, scale, out);
  }
}

#endif  // FLASHXLA_HOPPER

// Product: what the products of queries and keys take; it is Out but for e4m3.
template <typename Product, typename Out, int kDims, WideKeys kKeyKind, WideScores kScores>
__global__ void __launch_bounds__(WideShape<kDims, kKeyKind, kScores>::kThreads, 1)
    WideKernel(const __grid_constant__ WideProblem w) {
#if defined(FLASHXLA_HOPPER)
  using S = WideShape<kDims, kKeyKind, kScores>;
  extern __shared__ char memory[];
  const WideShared<S> shared(memory);
  if (threadIdx.x == 0) {
    PrefetchMap(&w.q);
    PrefetchMap(&w.k);
    PrefetchMap(&w.v);
    shared.InitBarriers(w.gathers);
  }
  __syncthreads();
  WaitForPrevious();
  // Not before: the engine for few queries, which comes next, relies on all that came before this
  // kernel, and does not wait for it.
  TriggerNext();
  const int items =
      w.p.makes_plan ? MakeOwnPlan<S>(w, memory) : w.p.plan.totals[kMany] * w.p.num_heads;
  const bool works = static_cast<int>(blockIdx.x) < items;
  if (threadIdx.x < S::kProducerThreads) {
    LowerRegisters<S::kProducerRegisters>();
    if (!works) return;
    const int warp = threadIdx.x / 32;
    if (S::kGathers && w.gathers) {
      if constexpr (S::kGathers) GatherKeys(w, shared, items);
    } else if constexpr (S::kDirect) {
      if (warp == 0) LoadKeys<S, false>(w, shared);
      if (warp == 1) LoadKeys<S, true>(w, shared);
      if (warp == 2) LoadQueries(w, shared, items);
    } else if (warp == 0) {
      LoadRaw(w, shared, items);
    } else if (!S::kFp8 && w.p.kv_dtype == FLASHXLA_F8E5M2) {
      ConvertKeys<Out, S, true>(w, shared);
    } else {
      ConvertKeys<Out, S, false>(w, shared);
    }
  } else {
    RaiseRegisters<S::kConsumerRegisters>();
    if (works) Consume<Product, Out, kDims>(w, shared);
  }
#endif
}

const char* WhyNotWide(const Facts& facts) {
  const Problem& p = facts.problem;
  if (const char* why = WhyNoTensorCores(p); why[0] != '\0') return why;
  if (!LoadedImage().hopper) return WhyNoHopper();
  if (IsFp8(p.q_dtype)) {
    if (p.q_dtype != FLASHXLA_F8E4M3 || p.kv_dtype != FLASHXLA_F8E4M3) {
      return "fp8 queries, and not all of e4m3";
    }
    if (WideHeadSizes::Bucket(p.head_size) > 128) return "fp8 queries with a head size above 128";
  }
  if (p.head_size % 8 != 0) return "the head size is not a multiple of 8";
  if (const char* why = WhyNoCacheBoxes(p, 1); why[0] != '\0') return why;
  if (!AreVectors(p.q, p.q_dtype)) {
    return "strides or addresses of the queries are not multiples of 16 bytes";
  }
  if (!TakesStride(p.num_heads, p.q.stride_head) || !TakesStride(p.num_tokens, p.q.stride_token)) {
    return "TMA does not support the strides of the queries";
  }
  if (!AreVectors(p.out, p.out_dtype)) {
    return "strides or addresses of out are not multiples of 16 bytes";
  }
  return "";
}

WideKeys KeysOf(const Problem& p) {
  return !IsFp8(p.kv_dtype)  ? WideKeys::kDirect
         : !IsFp8(p.q_dtype) ? WideKeys::kWidened
                             : WideKeys::kFp8;
}

// Keys that threads copy, since TMA takes longer.
bool Gathers(const Problem& p) {
  return KeysOf(p) == WideKeys::kDirect && KeysOfBox(p, kWideLeastBoxKeys) < kWideLeastBoxKeys;
}

// Whether the plan may divide the keys of q tiles. With fewer keys, or more q tiles, it does not,
// and the code for ALiBi and small pages has no room for it.
bool MayDivide(const Problem& p) {
  const WideKeys keys = KeysOf(p);
  if (keys == WideKeys::kDirect && (p.alibi_slopes.data != nullptr || Gathers(p))) return false;
  const int64_t sequences = p.index.num_sequences, tokens = p.num_tokens;
  const int64_t most = tokens / kManyQTileTokens + std::min(sequences, tokens / kMinManyQueries);
  const int tile_keys = WideKvTileKeys(WideHeadSizes::Bucket(p.head_size), keys);
  return most * p.num_heads <= 2 * kMaxPartials &&
         p.index.capacity > int64_t{kMinDividedKvTiles - 1} * tile_keys;
}

WideScores ScoresOf(const Problem& p) {
  if (p.alibi_slopes.data != nullptr || Gathers(p)) return WideScores::kAny;
  return p.softcap > 0.f || MayDivide(p) ? WideScores::kMore : WideScores::kPlain;
}

// The results of parts of q tiles. As WideWork, this must not depend on the softcap, without which
// a plan is made.
int64_t PartialBytes(const Problem& p) {
  const int dims = WideHeadSizes::Bucket(p.head_size);
  return int64_t{kMaxPartials} * WideConsumers(dims, KeysOf(p), ScoresOf(p)) *
         WidePartialVectors(dims) * kWarpgroupThreads * int64_t{sizeof(float4)};
}

int64_t WorkspaceBytes(const Problem& p) {
  if (!MayDivide(p)) return 0;
  constexpr int64_t kMostFlags = int64_t{kMaxPartials} * kMaxWideConsumers;
  constexpr int64_t kAlignment = 256;
  const int64_t bytes = PartialBytes(p) + kMostFlags * int64_t{sizeof(uint64_t)};
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

template <typename Product, typename Out, int kDims, WideKeys kKeyKind, WideScores kScores>
bool Launch(const Problem& p, void* workspace, cudaStream_t stream) {
  using S = WideShape<kDims, kKeyKind, kScores>;
  WideProblem w = {};
  w.p = p;
  w.box_keys = KeysOfBox(p, S::kKeys);
  w.gathers = S::kGathers && w.box_keys < kWideLeastBoxKeys;
  const int columns = S::kDirect ? S::kBlockColumns : S::kRawColumns;
  if (!MapQueries(p, S::kBlockColumns, S::kQTileTokens, &w.q) ||
      !MapCache(p, p.k, columns, w.box_keys, &w.k) ||
      !MapCache(p, p.v, columns, w.box_keys, &w.v)) {
    return false;
  }
  w.divides = MayDivide(p);
  w.partials = static_cast<float4*>(workspace);
  w.flags = reinterpret_cast<uint64_t*>(static_cast<char*>(workspace) + PartialBytes(p));
  w.tag = NewCallTag();
  auto* kernel = WideKernel<Product, Out, kDims, kKeyKind, kScores>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kBytes);
  LaunchDependent(kernel, NumMultiprocessors(), S::kThreads, S::kBytes, stream, w);
  return true;
}

// Softcaps and parts of fp8 keys have no instance of their own.
template <typename Product, typename Out, int kDims, WideKeys kKeyKind>
bool LaunchConverted(const Problem& p, WideScores scores, void* workspace, cudaStream_t stream) {
  return scores == WideScores::kPlain
             ? Launch<Product, Out, kDims, kKeyKind, WideScores::kPlain>(p, workspace, stream)
             : Launch<Product, Out, kDims, kKeyKind, WideScores::kAny>(p, workspace, stream);
}

flashxla_status LaunchWide(const Problem& p, void* workspace, cudaStream_t stream) {
  bool launched = false;
  const WideScores scores = ScoresOf(p);
  WithInstance<WideHeadSizes>(
      p.out_dtype, p.head_size, IsFp8(p.kv_dtype), [&](auto t, auto dims, auto is_fp8) {
        using Out = typename decltype(t)::type;
        constexpr int kDims = decltype(dims)::value;
        if constexpr (!decltype(is_fp8)::value) {
          constexpr WideKeys kDirect = WideKeys::kDirect;
          launched =
              scores == WideScores::kPlain
                  ? Launch<Out, Out, kDims, kDirect, WideScores::kPlain>(p, workspace, stream)
              : scores == WideScores::kMore
                  ? Launch<Out, Out, kDims, kDirect, WideScores::kMore>(p, workspace, stream)
                  : Launch<Out, Out, kDims, kDirect, WideScores::kAny>(p, workspace, stream);
        } else if (!IsFp8(p.q_dtype)) {
          launched =
              LaunchConverted<Out, Out, kDims, WideKeys::kWidened>(p, scores, workspace, stream);
        } else if constexpr (std::is_same_v<Out, __nv_bfloat16> && kDims <= 128) {
          launched = LaunchConverted<__nv_fp8_e4m3, Out, kDims, WideKeys::kFp8>(p, scores,
                                                                                workspace, stream);
        }
      });
  if (launched) return FLASHXLA_OK;
  return SetError(FLASHXLA_DEVICE_ERROR, "the driver refuses a tensor map of q, k or v");
}

}  // namespace

ManyShape WideWork(const Problem& p) {
  const int dims = WideHeadSizes::Bucket(p.head_size);
  const WideKeys keys = KeysOf(p);
  return {64 * WideConsumers(dims, keys, ScoresOf(p)), WideKvTileKeys(dims, keys), p.num_heads,
          NumMultiprocessors(), MayDivide(p)};
}

bool FitsOwnPlan(const Problem& p, int64_t num_sequences) {
  const int64_t tiles = PlanLayout::MaxManyTiles(num_sequences, p.num_tokens);
  return num_sequences <= kMaxOwnSequences && tiles <= kMaxOwnTiles &&
         tiles * p.num_heads <= int64_t{kMaxOwnRounds} * NumMultiprocessors();
}

const Engine kWideEngine = {
    "wide", "Hopper tensor cores (wgmma), TMA", kMany, WhyNotWide, WorkspaceBytes, LaunchWide};

}  // namespace flashxla::attention
