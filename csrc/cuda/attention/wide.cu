// wide: many queries on Hopper. A thread block computes q tiles of 128 query tokens of one head.
// The producer warps (wide_load.cuh) load by TMA. Two consumer warpgroups, of 64 rows each,
// multiply: they overlap the scores of the next kv tile with the softmax and values of the last.
#include "common/tensor_view.h"
#include "cuda/attention/dispatch.cuh"
#include "cuda/attention/engines.h"
#include "cuda/attention/tensor_map.h"
#include "cuda/attention/warp.cuh"
#include "cuda/attention/wide_load.cuh"

namespace flashxla::attention {
namespace {

constexpr int kThreads = 3 * kWarpgroupThreads;
[[maybe_unused]] constexpr int kConsumerWarps = 8;

#if defined(FLASHXLA_HOPPER)

// The softmax state of a warpgroup's 64 rows. A thread holds parts of two rows.
struct RowState {
  float row_max[2], row_sum[2];  // of the unscaled scores; of this thread's columns
  int begin[2], end[2];          // keys that each row sees
  int begin_all, end_all;        // keys that all 64 rows see

  // For rows row0 and row0 + 8 of a q tile, which are part of warpgroup `group`.
  __device__ RowState(const Problem& p, const WideTile& tile, int group, int row0) {
    const PlannedSequence& s = tile.s;
    const int last_query = s.num_queries - 1;
    const int group_query = tile.first_query + group * 64;
    begin_all = p.Visible(s, min(group_query + 63, last_query)).begin;
    end_all = p.Visible(s, min(group_query, last_query)).end;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Rows past the sequence's last repeat its mask. They are computed but not stored.
      const KeyRange keys = p.Visible(s, min(tile.first_query + row0 + 8 * r, last_query));
      begin[r] = keys.begin, end[r] = keys.end;
      row_max[r] = -INFINITY, row_sum[r] = 0.f;
    }
  }
};

template <int kColumns>
__device__ void OnlineSoftmax(float (&score)[kColumns / 2], RowState& rows, float scale,
                              int first_key, float softcap, bool negative, float (&factor)[2]) {
  const int lane = threadIdx.x & 31;
  if (negative) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) score[i] = -score[i];
  }
  if (softcap > 0.f) {  // `scale` is that of the capped scores
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      score[i] = TanhFromLog2(score[i] * softcap);
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
    rows.row_max[r] = row_max;
    float row_sum = 0.f;
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& x = score[i * 4 + 2 * r + j];
        x = Exp2(fmaf(x, scale, -base));
        row_sum += x;
      }
    }
    rows.row_sum[r] = rows.row_sum[r] * factor[r] + row_sum;
  }
}

// Normalizes and writes rows row0 and row0 + 8 of a q tile.
template <typename T, int kDims>
__device__ void StoreRows(const Problem& p, const WideTile& tile, int kv_head, int row0,
                          const RowState& rows, float scale, const float (&out)[kDims / 2]) {
  const int lane = threadIdx.x & 31;
  const float value_scale = p.ValueScale(tile.index, kv_head);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float row_sum = rows.row_sum[r];
    row_sum += __shfl_xor_sync(kAllLanes, row_sum, 1);
    row_sum += __shfl_xor_sync(kAllLanes, row_sum, 2);
    const int query = tile.first_query + row0 + 8 * r;
    if (query > tile.s.num_queries - 1) continue;
    const int token = tile.s.first_query + query;
    const float2 end = FinishRow(rows.row_max[r] * scale, row_sum, p.Sink(tile.head));
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

// The consumer warpgroups.
template <typename T, int kDims>
__device__ void Consume(const WideProblem& w, const WideShared<kDims>& shared) {
  using S = WideShape<kDims>;
  constexpr int kKeys = S::kKeys;
  // The warpgroups take turns at the tensor cores: one multiplies during the other's softmax.
  constexpr bool kTurns = kDims >= 128;
  constexpr int kTurnBarrier = 2, kZeroBarrier = 1;
  const Problem& p = w.p;
  const int lane = threadIdx.x & 31;
  const int group = threadIdx.x / kWarpgroupThreads - 1;
  const int row0 = group * 64 + threadIdx.x % kWarpgroupThreads / 32 * 16 + lane / 4;
  PipelineState<S::kStages> keys, values;
  PipelineState<S::kQueryStages> queries;
  if (kTurns && group == 1) ArriveNamed(kTurnBarrier, 2 * kWarpgroupThreads);

  WideTile tile(p);
  while (tile.Next(p)) {
    const PlannedSequence& s = tile.s;
    const int kv_head = tile.head / p.group_size;
    float scale = p.ScoreScale(tile.index, kv_head), softcap = 0.f;
    const bool negative = scale < 0.f;
    scale = fabsf(scale);
    if (p.softcap > 0.f) softcap = 2.f * kLog2e * scale / p.softcap, scale = p.softcap;
    // Not 0, since 0 times the -inf of a masked score is NaN.
    scale = fmaxf(scale * kLog2e, 1e-30f);
    RowState rows(p, tile, group, row0);
    float out[kDims / 2], score[kKeys / 2], factor[2];
    uint32_t weights[kKeys / 16][4];
#pragma unroll
    for (int i = 0; i < kDims / 2; ++i) out[i] = 0.f;

    uint32_t q_fragments[S::kQueriesInRegisters ? kDims / 16 : 1][4];
    auto start_scores = [&](int stage) {
      FenceMatrix();
#pragma unroll
      for (int k = 0; k < kDims / 16; ++k) {
        const int block = k / 4, step = k % 4 * 32;
        const uint64_t b =
            MatrixDescriptor(shared.keys(stage) + block * kKeys * kWideRowBytes + step, 0);
        if constexpr (S::kQueriesInRegisters) {
          Matrix<T, kKeys>::Scores(score, q_fragments[k], b, k > 0);
        } else {
          Matrix<T, kKeys>::Scores(score,
                                   MatrixDescriptor(shared.queries(queries.stage) +
                                                        block * kManyQTileTokens * kWideRowBytes +
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
      for (int k = 0; k < kKeys / 16; ++k) {
        Matrix<T, kDims>::Values(
            out, weights[k],
            MatrixDescriptor(shared.values(stage) + k * 16 * kWideRowBytes, kKeys * kWideRowBytes));
      }
      CommitMatrix();
    };
    // Waits for kv tile n's values, and zeroes those of keys that do not exist: they may hold NaN,
    // and 0 times NaN is not 0.
    auto wait_values = [&](int n) {
      WaitBarrier(shared.values_full(values.stage), values.parity);
      const int low = max(s.first_key - n * kKeys, 0), high = min(s.num_keys - n * kKeys, kKeys);
      if (low == 0 && high == kKeys) return;
      const int thread = threadIdx.x - kWarpgroupThreads;
      const int missing = low + kKeys - high;
      constexpr int kVectors = kWideRowBytes / 16;
      for (int i = thread; i < missing * kVectors * (kDims / kWideBlockColumns);
           i += 2 * kWarpgroupThreads) {
        int key = i / kVectors % missing;
        if (key >= low) key += high - low;
        const int block = i / kVectors / missing;
        const uint32_t to = shared.values(values.stage) + block * kKeys * kWideRowBytes +
                            key * kWideRowBytes + i % kVectors * 16;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
      }
      FenceProxy();
      SyncNamed(kZeroBarrier, 2 * kWarpgroupThreads);
    };
    auto release = [&](uint32_t barrier) {
      if (lane == 0) Arrive(barrier);
    };
    auto pack_weights = [&] {
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
        LoadMatrices(q_fragments[k], shared.queries(queries.stage) +
                                         k / 4 * kManyQTileTokens * kWideRowBytes +
                                         row * kWideRowBytes + (chunk ^ row % 8) * 16);
      }
      release(shared.queries_empty(queries.stage));
    }
    if (n >= first) {
      WaitBarrier(shared.keys_full(keys.stage), keys.parity);
      if (kTurns) SyncNamed(kTurnBarrier + group, 2 * kWarpgroupThreads);
      start_scores(keys.stage);
      if (kTurns) ArriveNamed(kTurnBarrier + 1 - group, 2 * kWarpgroupThreads);
      WaitMatrix<0>();
      Pin(score);
      release(shared.keys_empty(keys.stage));
      keys.Next();
      OnlineSoftmax<kKeys>(score, rows, scale, n * kKeys, softcap, negative, factor);
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
        release(shared.keys_empty(keys.stage));
        keys.Next();
        OnlineSoftmax<kKeys>(score, rows, scale, n * kKeys, softcap, negative, factor);
        WaitMatrix<0>();
        Pin(out);
        release(shared.values_empty(values.stage));
        values.Next();
#pragma unroll
        for (int i = 0; i < kDims / 2; ++i) out[i] *= factor[i / 2 % 2];
        pack_weights();
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

    StoreRows<T, kDims>(p, tile, kv_head, row0, rows, scale, out);
  }
}

#endif  // FLASHXLA_HOPPER

template <typename T, int kDims>
__global__ void __launch_bounds__(kThreads, 1) WideKernel(const __grid_constant__ WideProblem w) {
#if defined(FLASHXLA_HOPPER)
  using S = WideShape<kDims>;
  extern __shared__ char memory[];
  const WideShared<kDims> shared(memory);
  TriggerNext();
  WaitForPrevious();
  if (static_cast<int>(blockIdx.x) >= w.p.plan.totals[kMany] * w.p.num_heads) return;
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
  if (threadIdx.x < kWarpgroupThreads) {
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

const char* WhyNotWide(const Facts& facts) {
  const Problem& p = facts.problem;
  if (const char* why = WhyNoTensorCores(p); why[0] != '\0') return why;
  if (!LoadedImage().hopper) return WhyNoHopper();
  if (IsFp8(p.q_dtype)) return "queries are fp8";
  if (p.kv_dtype != p.q_dtype) return "keys and queries differ in dtype";
  if (p.head_size % 8 != 0) return "the head size is not a multiple of 8";
  if (p.alibi_slopes.data != nullptr) return "ALiBi slopes";
  if (const char* why = WhyNoCacheBoxes(p); why[0] != '\0') return why;
  if (!AreVectors(p.q)) return "strides or addresses of the queries are not multiples of 16 bytes";
  if (!TakesStride(p.num_heads, p.q.stride_head) || !TakesStride(p.num_tokens, p.q.stride_token)) {
    return "TMA does not support the strides of the queries";
  }
  if (!p.out_pairs) return "out's strides or address do not allow 4-byte stores";
  return "";
}

flashxla_status LaunchWide(const Problem& p, void*, cudaStream_t stream) {
  WideProblem w = {};
  w.p = p;
  w.box_keys = KeysOfBox(p, WideKvTileKeys(p.head_size));
  if (!MapQueries(p, kWideBlockColumns, kManyQTileTokens, &w.q) ||
      !MapCache(p, p.k, kWideBlockColumns, w.box_keys, &w.k) ||
      !MapCache(p, p.v, kWideBlockColumns, w.box_keys, &w.v)) {
    return SetError(FLASHXLA_DEVICE_ERROR, "the driver refuses a tensor map of q, k or v");
  }
  WithInstance(p.out_dtype, p.head_size, false, [&](auto t, auto dims, auto is_fp8) {
    if constexpr (!decltype(is_fp8)::value) {
      using T = typename decltype(t)::type;
      constexpr int kDims = decltype(dims)::value;
      auto* kernel = WideKernel<T, kDims>;
      constexpr int kBytes = WideShape<kDims>::kBytes;
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
      LaunchDependent(kernel, NumMultiprocessors(), kThreads, kBytes, stream, w);
    }
  });
  return FLASHXLA_OK;
}

}  // namespace

const Engine kWideEngine = {
    "wide", "Hopper tensor cores (wgmma), TMA", kMany, WhyNotWide, nullptr, LaunchWide};

}  // namespace flashxla::attention
