// wide: Hopper. A thread block takes a key tile of a KV head. It goes over the row tiles that see
// it, of all heads of the group, and keeps grad_k and grad_v in the registers of two consumer
// warpgroups. Gradients of queries are added up in memory by TMA, and written by wide_sums.cu.
#include "common/tensor_view.h"
#include "cuda/attention/tensor_map.h"
#include "cuda/attention_backward/engines.h"
#include "cuda/attention_backward/wide_by_columns.cuh"
#include "cuda/attention_backward/wide_by_keys.cuh"

namespace flashxla::attention_backward {
namespace {

constexpr int kThreads = 3 * kWarpgroupThreads;

template <typename T, int kDims, int kValueDims>
__global__ void __launch_bounds__(kThreads, 1) WideKernel(const __grid_constant__ WideProblem w) {
#if defined(FLASHXLA_HOPPER)
  using S = WideShape<kDims, kValueDims>;
  extern __shared__ char memory[];
  const WideShared<S> shared(memory);
  if (threadIdx.x == 0) {
    attention::PrefetchMap(&w.q);
    attention::PrefetchMap(&w.k);
    attention::PrefetchMap(&w.v);
    attention::PrefetchMap(&w.grad_out);
    attention::InitBarrier(shared.keys_full(), 1);
    attention::InitBarrier(shared.keys_empty(), kConsumerThreads + 2);  // and two that move data
    attention::InitBarrier(shared.sums_full(), kConsumerThreads);
    attention::InitBarrier(shared.sums_empty(), 1);
    for (int i = 0; i < S::kStages; ++i) {
      attention::InitBarrier(shared.queries_full(i), 1);
      attention::InitBarrier(shared.queries_empty(i), kConsumerThreads);
    }
    for (int i = 0; i < S::kGradOutStages; ++i) {
      attention::InitBarrier(shared.grad_out_full(i), 1);
      attention::InitBarrier(shared.grad_out_empty(i), kConsumerThreads);
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
    if constexpr (kDims > 128) {
      ConsumeByColumns<T>(w, shared);
    } else {
      ConsumeByKeys<T>(w, shared);
    }
  }
#endif
}

int KeyTile(const Problem& p) {
  return WideKeyTile(attention::WideHeadSizes::Bucket(p.LargerHeadSize()));
}

const char* WhyNotWide(const Problem& p) {
  if (p.dtype == FLASHXLA_F32) return "float32 has an engine of its own";
  if (!LoadedImage().hopper) return WhyNoHopper();
  if (p.LargerHeadSize() > attention::kMaxUsualHeadSize) return "the head size is above 256";
  if (!p.vectors) return "strides or addresses are not multiples of 16 bytes";
  if (p.num_keys == 0) return "there are no keys";
  for (const Rows& rows : {p.q, p.grad_out}) {
    if (!attention::TakesStride(p.num_heads, rows.stride_head) ||
        !attention::TakesStride(p.num_tokens, rows.stride_token)) {
      return "TMA does not support the strides";
    }
  }
  for (const Rows& rows : {p.k, p.v}) {
    if (!attention::TakesStride(p.num_kv_heads, rows.stride_head) ||
        !attention::TakesStride(p.num_keys, rows.stride_token)) {
      return "TMA does not support the strides";
    }
  }
  return "";
}

template <typename T, int kDims, int kValueDims>
void Launch(const WideProblem& w, cudaStream_t stream) {
  constexpr int kBytes = WideShape<kDims, kValueDims>::kBytes;
  auto* kernel = WideKernel<T, kDims, kValueDims>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  kernel<<<NumMultiprocessors(), kThreads, kBytes, stream>>>(w);
}

flashxla_status LaunchWide(const Problem& p, cudaStream_t stream) {
  WideProblem w = {};
  w.p = p;
  auto map_queries = [&](const Rows& rows, int head_size, CUtensorMap* to) {
    return attention::MapRows(rows, p.dtype, p.num_tokens, p.num_heads, head_size, kBlockColumns, 1,
                              kRowTile, to);
  };
  auto map_keys = [&](const Rows& rows, int head_size, CUtensorMap* to) {
    return attention::MapRows(rows, p.dtype, p.num_keys, p.num_kv_heads, head_size, kBlockColumns,
                              1, KeyTile(p), to);
  };
  if (!map_queries(p.q, p.head_size, &w.q) ||
      !map_queries(p.grad_out, p.v_head_size, &w.grad_out) || !map_keys(p.k, p.head_size, &w.k) ||
      !map_keys(p.v, p.v_head_size, &w.v)) {
    return SetError(FLASHXLA_DEVICE_ERROR,
                    "the driver refuses a tensor map of q, k, v or grad_out");
  }
  attention::WithInstance<attention::WideHeadSizes>(
      p.dtype, p.LargerHeadSize(), false, [&](auto t, auto dims, auto) {
        using T = typename decltype(t)::type;
        constexpr int kDims = decltype(dims)::value;
        attention::WideValueDims(kDims, p.v_head_size) == kDims
            ? Launch<T, kDims, kDims>(w, stream)
            : Launch<T, kDims, attention::WideValueDims(kDims, 1)>(w, stream);
      });
  LaunchWideSums(p, stream);
  return FLASHXLA_OK;
}

}  // namespace

const Engine kWideEngine = {
    "wide", "Hopper tensor cores (wgmma), TMA", WhyNotWide, KeyTile, NumWideSums, LaunchWide,
    false};

}  // namespace flashxla::attention_backward
