// What is computed once for each query row, before and after the engines, and zeros.
#include <algorithm>

#include "common/tensor_view.h"
#include "cuda/attention/warp.cuh"
#include "cuda/attention_backward/engines.h"

namespace flashxla::attention_backward {
namespace {

using attention::kAllLanes;
using attention::SumOfWarp;

constexpr int kThreads = 256, kWarps = kThreads / 32;

// Sums up the products of 16 bytes of elements.
template <typename Pair>
__device__ float Dot(uint4 a, uint4 b, float2 (*widen)(Pair)) {
  const auto *x = reinterpret_cast<const Pair*>(&a), *y = reinterpret_cast<const Pair*>(&b);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 u = widen(x[i]), v = widen(y[i]);
    sum = fmaf(u.x, v.x, fmaf(u.y, v.y, sum));
  }
  return sum;
}

__device__ float Dot(uint4 a, uint4 b, int dtype) {
  if (dtype == FLASHXLA_BF16) return Dot<__nv_bfloat162>(a, b, __bfloat1622float2);
  if (dtype == FLASHXLA_F16) return Dot<__half2>(a, b, __half22float2);
  const auto *x = reinterpret_cast<const float*>(&a), *y = reinterpret_cast<const float*>(&b);
  return fmaf(x[0], y[0], fmaf(x[1], y[1], fmaf(x[2], y[2], x[3] * y[3])));
}

// A row's part of a thread: the dot product of 16 bytes of grad_out and out.
__device__ float PartDot(const Problem& p, int token, int head, int part) {
  const int size = p.dtype == FLASHXLA_F32 ? 4 : 2;
  auto at = [&](const Rows& rows) {
    const int64_t row = token * rows.stride_token + head * rows.stride_head;
    return reinterpret_cast<const uint4*>(rows.data + row * size)[part];
  };
  return Dot(at(p.grad_out), at(p.out), p.dtype);
}

__device__ void StoreRow(const Problem& p, int64_t place, int token, int head, float dot) {
  const float lse = p.lse.at(token, head);
  p.delta[place] = dot - p.grad_lse.at(token, head);
  p.lse2[place] = lse == -INFINITY ? INFINITY : lse * kLog2e;
}

// A thread block per row tile and head. kLanes lanes share a row, 16 bytes each at a time; kLanes
// is 0 where rows cannot be read so.
template <int kLanes>
__global__ void __launch_bounds__(kThreads) DeltaKernel(const __grid_constant__ Problem p) {
  const int tile = blockIdx.x, head = blockIdx.y;
  if (tile >= p.plan.row_tile_starts[p.plan.num_sequences]) return;
  auto* sums =
      reinterpret_cast<float4*>(p.sums) + (int64_t{tile} * p.num_heads + head) * (p.num_sums / 4);
  for (int i = threadIdx.x; i < p.num_sums / 4; i += kThreads) {
    sums[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  if (threadIdx.x == 0) p.turns[int64_t{tile} * p.num_heads + head] = 0;
  const int sequence = attention::FindStart(p.plan.row_tile_starts, p.plan.num_sequences, tile);
  const PlannedSequence s = p.plan.sequences[sequence];
  const int first = (tile - p.plan.row_tile_starts[sequence]) * kRowTile;
  const int64_t place = head * p.plan.num_rows() + int64_t{tile} * kRowTile;
  const int num_rows = min(s.num_queries - first, kRowTile);
  const int token = s.first_query + first;
  for (int row = num_rows + threadIdx.x; row < kRowTile; row += kThreads) {
    p.delta[place + row] = 0.f, p.lse2[place + row] = INFINITY;
  }
  if constexpr (kLanes == 0) {
    for (int row = threadIdx.x / 32; row < num_rows; row += kWarps) {
      float dot = 0.f;
      for (int d = threadIdx.x % 32; d < p.v_head_size; d += 32) {
        dot = fmaf(LoadElement(p.grad_out, p.dtype, token + row, head, d),
                   LoadElement(p.out, p.dtype, token + row, head, d), dot);
      }
      dot = SumOfWarp(dot);
      if (threadIdx.x % 32 == 0) StoreRow(p, place + row, token + row, head, dot);
    }
  } else {
    constexpr int kAtOnce = kThreads / kLanes, kRounds = kRowTile / kAtOnce;
    const int lane = threadIdx.x % kLanes;
    const int parts = p.v_head_size * (p.dtype == FLASHXLA_F32 ? 4 : 2) / 16;
    float dot[kRounds] = {};
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int row = i * kAtOnce + threadIdx.x / kLanes;
      if (row >= num_rows) continue;
      for (int part = lane; part < parts; part += kLanes) {
        dot[i] += PartDot(p, token + row, head, part);
      }
    }
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int row = i * kAtOnce + threadIdx.x / kLanes;
#pragma unroll
      for (int step = kLanes / 2; step > 0; step /= 2) {
        dot[i] += __shfl_xor_sync(kAllLanes, dot[i], step);
      }
      if (lane == 0 && row < num_rows) StoreRow(p, place + row, token + row, head, dot[i]);
    }
  }
}

__device__ float Sink(const Problem& p, int head) {
  return attention::LoadFloat(static_cast<const char*>(p.sinks), head * p.sinks_stride,
                              p.sink_dtype);
}

// A thread block per head, which adds in the same order each time.
__global__ void __launch_bounds__(kThreads) SinksKernel(const __grid_constant__ Problem p) {
  __shared__ float sums[kWarps];
  const int head = blockIdx.x;
  const int64_t rows = int64_t{p.plan.row_tile_starts[p.plan.num_sequences]} * kRowTile;
  const float sink2 = Sink(p, head) * kLog2e;
  const float* lse2 = p.lse2 + head * p.plan.num_rows();
  const float* delta = p.delta + head * p.plan.num_rows();
  float sum = 0.f;
  for (int64_t i = threadIdx.x; i < rows; i += kThreads) {
    if (lse2[i] != INFINITY) sum = fmaf(exp2f(sink2 - lse2[i]), delta[i], sum);
  }
  sum = SumOfWarp(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  float total = 0.f;
  for (const float x : sums) total += x;
  StoreElement(p.grad_sinks, head * p.grad_sinks_stride, p.sink_dtype, -total);
}

// A warp per token.
__global__ void __launch_bounds__(kThreads) IdleKernel(const __grid_constant__ Problem p) {
  const int token = blockIdx.x * kWarps + threadIdx.x / 32;
  if (token >= p.num_tokens || p.plan.token_sequence[token] != attention::kNoSequence) return;
  for (int i = threadIdx.x % 32; i < p.num_heads * p.head_size; i += 32) {
    StoreElement(p.grad_q, p.dtype, token, i / p.head_size, i % p.head_size, 0.f);
  }
}

__global__ void __launch_bounds__(kThreads)
    ClearKernel(const __grid_constant__ flashxla_tensor t, int64_t size) {
  for (int64_t n = int64_t{blockIdx.x} * kThreads + threadIdx.x; n < size;
       n += int64_t{gridDim.x} * kThreads) {
    int64_t rest = n, i = 0;
    for (int64_t d = t.rank - 1; d >= 0; --d) {
      i += rest % t.shape[d] * t.stride[d];
      rest /= t.shape[d];
    }
    StoreElement(t.data, i, static_cast<int>(t.dtype), 0.f);
  }
}

}  // namespace

void LaunchClear(const flashxla_tensor& t, cudaStream_t stream) {
  int64_t size = 1;
  for (int64_t d = 0; d < t.rank; ++d) size *= t.shape[d];
  const int64_t blocks = std::min<int64_t>((size + kThreads - 1) / kThreads, 1 << 16);
  ClearKernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(t, size);
}

void LaunchDelta(const Problem& p, cudaStream_t stream) {
  const dim3 blocks(p.plan.num_row_tiles, p.num_heads);
  auto launch = [&](auto* kernel) { kernel<<<blocks, kThreads, 0, stream>>>(p); };
  const int parts = p.v_head_size * (p.dtype == FLASHXLA_F32 ? 4 : 2) / 16;
  if (!p.vectors) {
    launch(DeltaKernel<0>);
  } else if (parts <= 8) {
    launch(DeltaKernel<8>);
  } else if (parts <= 16) {
    launch(DeltaKernel<16>);
  } else {
    launch(DeltaKernel<32>);
  }
}

void LaunchSinks(const Problem& p, cudaStream_t stream) {
  SinksKernel<<<p.num_heads, kThreads, 0, stream>>>(p);
}

void LaunchIdle(const Problem& p, cudaStream_t stream) {
  IdleKernel<<<(p.num_tokens + kWarps - 1) / kWarps, kThreads, 0, stream>>>(p);
}

}  // namespace flashxla::attention_backward
