// wide: Hopper. A thread block takes a key tile of a KV head. It goes over the row tiles that see
// it, of all heads of the group, and keeps grad_k and grad_v in registers. Gradients of queries are
// added up in memory by TMA, and written by wide_sums.cu.
//
// Two consumer warpgroups have 64 keys each. Scores and weights are [keys, queries] there, so that
// the weights are in registers where they are multiplied with grad_out and queries. For grad_q, the
// gradients of the scores go through shared memory: each warpgroup computes half of the columns,
// from the keys of both.
#include <type_traits>

#include "common/tensor_view.h"
#include "cuda/attention/tensor_map.h"
#include "cuda/attention/warp.cuh"
#include "cuda/attention_backward/engines.h"
#include "cuda/attention_backward/turned_product.cuh"
#include "cuda/attention_backward/wide_shared.cuh"
#include "cuda/attention_backward/wide_sums.h"

namespace flashxla::attention_backward {
namespace {

using attention::kWarpgroupThreads;

constexpr int kThreads = 3 * kWarpgroupThreads;
[[maybe_unused]] constexpr int kConsumerThreads = 2 * kWarpgroupThreads;
[[maybe_unused]] constexpr int kConsumerWarps = 8;
// Named barriers of the consumers.
[[maybe_unused]] constexpr int kZeroBarrier = 1, kScoresBarrier = 2;

#if defined(FLASHXLA_HOPPER)

using attention::Exp2;
using attention::Matrix;
using attention::MatrixDescriptor;
using attention::Pack;
using attention::Pin;

__device__ inline float2 LoadPair(uint32_t address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
  return x;
}

__device__ inline void StoreMatrices(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

__device__ inline void StoreShared4(uint32_t to, const float* x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}

// Writes zeros to rows of a tile in shared memory that do not belong to the sequence: they may hold
// NaN, and 0 times NaN is not 0. Rows [low, high) stay. Both warpgroups must call it, with the same
// arguments.
template <int kRows, int kBlocks>
__device__ void ZeroOthers(uint32_t tile, int low, int high) {
  if (low <= 0 && high >= kRows) return;
  constexpr int kVectors = kRowBytes / 16;
  const int thread = threadIdx.x - kWarpgroupThreads;
  for (int i = thread; i < kRows * kBlocks * kVectors; i += kConsumerThreads) {
    const int row = i / kVectors % kRows;
    if (row >= low && row < high) continue;
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(tile + i * 16), "r"(0)
                 : "memory");
  }
  attention::FenceProxy();
  attention::SyncNamed(kZeroBarrier, kConsumerThreads);
}

// Which queries see the keys of this thread, rows row and row + 8 of the key tile, and those of its
// whole warpgroup.
struct KeyRows {
  int low[2], high[2];    // queries that see each key
  int low_all, high_all;  // queries that see all 64 keys

  __device__ KeyRows(const Problem& p, const WideItem& item, int group, int row) {
    const int first = item.first_key + group * 64;
    low_all = item.FirstQuery(p.window, first + 63), high_all = item.EndQuery(p.window, first);
    if (first < item.low_key || first + 64 > item.high_key) low_all = item.num_queries;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int j = item.first_key + row + 8 * r;
      const bool exists = j >= item.low_key && j < item.high_key;
      low[r] = exists ? item.FirstQuery(p.window, j) : item.num_queries;
      high[r] = exists ? item.EndQuery(p.window, j) : 0;
    }
  }
};

// Writes rows row and row + 8 of a key tile's gradients.
template <typename T, int kDims>
__device__ void StoreKeys(const Rows& to, const WideItem& item, int head_size, int row, float scale,
                          const float (&grad)[kDims / 2]) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int j = item.first_key + row + 8 * r;
    if (j < item.low_key || j >= item.high_key) continue;
    T* out = reinterpret_cast<T*>(to.data) + (item.key_row + j) * to.stride_token +
             item.kv_head * to.stride_head;
#pragma unroll
    for (int i = 0; i < kDims / 8; ++i) {
      const int d = i * 8 + lane % 4 * 2;
      if (d < head_size) {
        *reinterpret_cast<uint32_t*>(out + d) =
            Pack<T>(grad[i * 4 + 2 * r] * scale, grad[i * 4 + 2 * r + 1] * scale);
      }
    }
  }
}

// The consumer warpgroups.
template <typename T, int kDims>
__device__ void Consume(const WideProblem& w, const WideShared<kDims>& shared) {
  using S = WideShape<kDims>;
  constexpr int kScores = kRowTile / 2;    // registers of scores
  constexpr int kHalfColumns = kDims / 2;  // of grad_q
  constexpr int kHalf = kHalfColumns / 2;  // registers of grad_q
  const Problem& p = w.p;
  const int lane = threadIdx.x & 31;
  // The same in all threads, which the compiler must see: addresses of operands come from it.
  const int group = __shfl_sync(attention::kAllLanes, threadIdx.x / kWarpgroupThreads, 0) - 1;
  const int thread = threadIdx.x % kWarpgroupThreads, warp = thread / 32;
  const int row = group * 64 + warp * 16 + lane / 4;
  // softmax_scale, in log2, and what turns products into softcap's argument.
  const float scale2 = (p.softcap > 0.f ? p.softcap : p.softmax_scale) * kLog2e;
  const float cap_scale = p.softcap > 0.f ? 2.f * kLog2e * p.softmax_scale / p.softcap : 0.f;
  uint32_t steps = 0;

  for (uint32_t items = 0;; ++items) {
    attention::WaitBarrier(shared.keys_full(), items % 2);
    const int num_steps = __shfl_sync(attention::kAllLanes, LoadShared2(shared.item()).y, 0);
    if (num_steps < 0) return;
    const uint32_t keys = shared.keys(), values = shared.values();
    const KeyRows rows(p, LoadShared<WideItem>(shared.item()), group, row);
    float grad_k[kDims / 2], grad_v[kDims / 2];
#pragma unroll
    for (int i = 0; i < kDims / 2; ++i) grad_k[i] = grad_v[i] = 0.f;
    auto release = [&](uint32_t barrier) {
      __syncwarp();
      if (lane == 0) attention::Arrive(barrier);
    };
    // c = rows of a [64 x kDims] times those of b.
    auto start_scores = [&](float (&c)[kScores], uint32_t a, uint32_t b) {
      attention::FenceMatrix();
#pragma unroll
      for (int k = 0; k < kDims / 16; ++k) {
        const int block = k / 4, step = k % 4 * 32;
        Matrix<T, kRowTile>::Scores(
            c, MatrixDescriptor(a + block * kKeyBlockBytes + group * 64 * kRowBytes + step, 0),
            MatrixDescriptor(b + block * kRowBlockBytes + step, 0), k > 0);
      }
      attention::CommitMatrix();
    };
    // Adds weights [64 x kRowTile] times rows [kRowTile x kDims].
    auto start_gradient = [&](float (&c)[kDims / 2], const uint32_t (&weights)[kRowTile / 16][4],
                              uint32_t b) {
      attention::FenceMatrix();
#pragma unroll
      for (int k = 0; k < kRowTile / 16; ++k) {
        Matrix<T, kDims>::Values(c, weights[k],
                                 MatrixDescriptor(b + k * 16 * kRowBytes, kRowBlockBytes));
      }
      attention::CommitMatrix();
    };
    // Waits for a step's queries.
    auto wait_queries = [&](const Turn<S::kStages>& turn) {
      attention::WaitBarrier(shared.queries_full(turn.stage), turn.parity);
      ZeroOthers<kRowTile, S::kBlocks>(shared.queries(turn.stage), 0,
                                       LoadShared2(shared.step(turn.stage)).y);
    };

    {
      const auto item = LoadShared<WideItem>(shared.item());
      ZeroOthers<kKeyTile, S::kBlocks>(keys, item.low_key - item.first_key,
                                       item.high_key - item.first_key);
    }
    for (int n = 0; n < num_steps; ++n, ++steps) {
      const Turn<S::kStages> turn(steps);
      float score[kScores], product[kScores];
      wait_queries(turn);
      const int2 of_step = LoadShared2(shared.step(turn.stage));
      const int first_query = of_step.x;
      start_scores(score, keys, shared.queries(turn.stage));
      attention::WaitBarrier(shared.grad_out_full(turn.stage), turn.parity);
      ZeroOthers<kRowTile, S::kBlocks>(shared.grad_out(turn.stage), 0, of_step.y);
      start_scores(product, values, shared.grad_out(turn.stage));
      attention::WaitMatrix<1>();
      Pin(score);

      const bool masked = first_query < rows.low_all || first_query + kRowTile > rows.high_all;
      // Relative to this thread's first column, so that its columns are compile-time constants.
      const int offset = first_query + lane % 4 * 2;
      const int low[2] = {rows.low[0] - offset, rows.low[1] - offset};
      const int high[2] = {rows.high[0] - offset, rows.high[1] - offset};
      auto sees = [&](int column, int r) { return column >= low[r] && column < high[r]; };

      // Weights; then `score` is what the gradients of the scores are multiplied by.
      const uint32_t lse2 = shared.lse2(turn.stage) + lane % 4 * 8;
      uint32_t weights[kRowTile / 16][4];
      auto weigh = [&](auto is_masked, auto has_softcap) {
#pragma unroll
        for (int i = 0; i < kRowTile / 8; ++i) {
          const float2 base = LoadPair(lse2 + i * 32);
          float weight[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            float& x = score[i * 4 + j];
            if constexpr (has_softcap) {
              // tanh(x) = 1 - 2 / (1 + e^2x), to 1e-7.
              x = 1.f - __fdividef(2.f, 1.f + Exp2(x * cap_scale));
            }
            weight[j] = Exp2(fmaf(x, scale2, -(j % 2 ? base.y : base.x)));
            if (is_masked && !sees(i * 8 + j % 2, j / 2)) weight[j] = 0.f;
            x = has_softcap ? weight[j] * (1.f - x * x) : weight[j];
          }
          weights[i / 2][i % 2 * 2] = Pack<T>(weight[0], weight[1]);
          weights[i / 2][i % 2 * 2 + 1] = Pack<T>(weight[2], weight[3]);
        }
      };
      if (cap_scale != 0.f) {
        masked ? weigh(std::true_type{}, std::true_type{})
               : weigh(std::false_type{}, std::true_type{});
      } else {
        masked ? weigh(std::true_type{}, std::false_type{})
               : weigh(std::false_type{}, std::false_type{});
      }
      start_gradient(grad_v, weights, shared.grad_out(turn.stage));

      attention::WaitMatrix<1>();
      Pin(product);
      const uint32_t delta = shared.delta(turn.stage) + lane % 4 * 8;
      uint32_t gradients[kRowTile / 16][4];
      auto differentiate = [&](auto is_masked) {
#pragma unroll
        for (int i = 0; i < kRowTile / 8; ++i) {
          const float2 of_row = LoadPair(delta + i * 32);
          float x[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            x[j] = score[i * 4 + j] * (product[i * 4 + j] - (j % 2 ? of_row.y : of_row.x));
            if (is_masked && !sees(i * 8 + j % 2, j / 2)) x[j] = 0.f;
          }
          gradients[i / 2][i % 2 * 2] = Pack<T>(x[0], x[1]);
          gradients[i / 2][i % 2 * 2 + 1] = Pack<T>(x[2], x[3]);
        }
      };
      masked ? differentiate(std::true_type{}) : differentiate(std::false_type{});
      {
        const int key = row - lane / 4 + lane % 16;
        const uint32_t to = shared.scores(turn.stage) + key * kRowBytes;
#pragma unroll
        for (int k = 0; k < kRowTile / 16; ++k) {
          StoreMatrices(to + ((2 * k + lane / 16) ^ key % 8) * 16, gradients[k]);
        }
      }
      attention::FenceProxy();
      attention::SyncNamed(kScoresBarrier, kConsumerThreads);

      float grad_q[kHalf];
      attention::FenceMatrix();
#pragma unroll
      for (int k = 0; k < kKeyTile / 16; ++k) {
        const uint32_t half = keys + group * kHalfColumns / kBlockColumns * kKeyBlockBytes +
                              group * kHalfColumns % kBlockColumns * 2;
        TurnedProduct<T, kHalfColumns>::Start(
            grad_q,
            MatrixDescriptor(shared.scores(turn.stage) + k * 16 * kRowBytes, kKeyBlockBytes),
            MatrixDescriptor(half + k * 16 * kRowBytes, kKeyBlockBytes), k > 0);
      }
      attention::CommitMatrix();
      start_gradient(grad_k, gradients, shared.queries(turn.stage));
      attention::WaitMatrix<1>();
      Pin(grad_v);
      Pin(grad_q);
      release(shared.grad_out_empty(turn.stage));
      attention::WaitBarrier(shared.sums_empty(), steps % 2 ^ 1);
      const uint32_t sums = shared.sums() + (group * kHalf / 4 * kWarpgroupThreads + thread) * 16;
#pragma unroll
      for (int i = 0; i < kHalf / 4; ++i) {
        StoreShared4(sums + i * kWarpgroupThreads * 16, grad_q + i * 4);
      }
      attention::FenceProxy();
      release(shared.sums_full());
      attention::WaitMatrix<0>();
      Pin(grad_k);
      release(shared.queries_empty(turn.stage));
    }
    const auto item = LoadShared<WideItem>(shared.item());
    release(shared.keys_empty());
    StoreKeys<T, kDims>(p.grad_k, item, p.head_size, row, p.softmax_scale, grad_k);
    StoreKeys<T, kDims>(p.grad_v, item, p.head_size, row, 1.f, grad_v);
  }
}

#endif  // FLASHXLA_HOPPER

template <typename T, int kDims>
__global__ void __launch_bounds__(kThreads, 1) WideKernel(const __grid_constant__ WideProblem w) {
#if defined(FLASHXLA_HOPPER)
  using S = WideShape<kDims>;
  extern __shared__ char memory[];
  const WideShared<kDims> shared(memory);
  if (threadIdx.x == 0) {
    attention::PrefetchMap(&w.q);
    attention::PrefetchMap(&w.k);
    attention::PrefetchMap(&w.v);
    attention::PrefetchMap(&w.grad_out);
    attention::InitBarrier(shared.keys_full(), 1);
    attention::InitBarrier(shared.keys_empty(), kConsumerWarps + 2);  // and two that move data
    attention::InitBarrier(shared.sums_full(), kConsumerWarps);
    attention::InitBarrier(shared.sums_empty(), 1);
    for (int i = 0; i < S::kStages; ++i) {
      attention::InitBarrier(shared.queries_full(i), 1);
      attention::InitBarrier(shared.grad_out_full(i), 1);
      attention::InitBarrier(shared.queries_empty(i), kConsumerWarps);
      attention::InitBarrier(shared.grad_out_empty(i), kConsumerWarps);
    }
    attention::FenceProxy();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroupThreads) {
    attention::LowerRegisters<24>();
    if (threadIdx.x == 0) LoadKeysAndQueries(w, shared);
    if (threadIdx.x == 32) LoadGradOut(w, shared);
    if (threadIdx.x == 64) AddSums(w, shared);
  } else {
    attention::RaiseRegisters<240>();
    Consume<T, kDims>(w, shared);
  }
#endif
}

// TMA needs strides of at least one element and less than 2^40 bytes.
bool TakesStride(int64_t size, int64_t stride) {
  return size <= 1 || (stride > 0 && stride < (int64_t{1} << 39));
}

const char* WhyNotWide(const Problem& p) {
  if (p.dtype == FLASHXLA_F32) return "float32 needs CUDA cores";
  if (!LoadedImage().hopper) return WhyNoHopper();
  if (p.head_size != p.v_head_size) return "keys and values differ in head size";
  if (p.head_size > 128) return "the head size is above 128";
  if (p.alibi_slopes.data != nullptr) return "ALiBi slopes";
  if (!p.vectors) return "strides or addresses are not multiples of 16 bytes";
  if (p.num_keys == 0) return "there are no keys";
  for (const Rows& rows : {p.q, p.grad_out}) {
    if (!TakesStride(p.num_heads, rows.stride_head) ||
        !TakesStride(p.num_tokens, rows.stride_token)) {
      return "TMA does not support the strides";
    }
  }
  for (const Rows& rows : {p.k, p.v}) {
    if (!TakesStride(p.num_kv_heads, rows.stride_head) ||
        !TakesStride(p.num_keys, rows.stride_token)) {
      return "TMA does not support the strides";
    }
  }
  return "";
}

flashxla_status LaunchWide(const Problem& p, cudaStream_t stream) {
  WideProblem w = {};
  w.p = p;
  auto map = [&](const Rows& rows, int num_rows, int num_heads, int box, CUtensorMap* to) {
    return attention::MapRows(rows, p.dtype, num_rows, num_heads, p.head_size, kBlockColumns, box,
                              to);
  };
  if (!map(p.q, p.num_tokens, p.num_heads, kRowTile, &w.q) ||
      !map(p.grad_out, p.num_tokens, p.num_heads, kRowTile, &w.grad_out) ||
      !map(p.k, p.num_keys, p.num_kv_heads, kKeyTile, &w.k) ||
      !map(p.v, p.num_keys, p.num_kv_heads, kKeyTile, &w.v)) {
    return SetError(FLASHXLA_DEVICE_ERROR,
                    "the driver refuses a tensor map of q, k, v or grad_out");
  }
  auto launch = [&](auto* kernel, int bytes) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    kernel<<<NumMultiprocessors(), kThreads, bytes, stream>>>(w);
  };
  const bool half = p.dtype == FLASHXLA_F16;
  if (WideDims(p) == 64) {
    constexpr int kBytes = WideShape<64>::kBytes;
    half ? launch(WideKernel<__half, 64>, kBytes) : launch(WideKernel<__nv_bfloat16, 64>, kBytes);
  } else {
    constexpr int kBytes = WideShape<128>::kBytes;
    half ? launch(WideKernel<__half, 128>, kBytes) : launch(WideKernel<__nv_bfloat16, 128>, kBytes);
  }
  LaunchWideSums(p, stream);
  return FLASHXLA_OK;
}

}  // namespace

const Engine kWideEngine = {
    "wide", "Hopper tensor cores (wgmma), TMA", WhyNotWide, NumWideSums, LaunchWide, false};

}  // namespace flashxla::attention_backward
