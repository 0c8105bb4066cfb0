// Writes grad_q from the sums that wide's thread blocks have added up.
#include "cuda/attention/hopper.cuh"
#include "cuda/attention/mma.cuh"
#include "cuda/attention/warp.cuh"
#include "cuda/attention_backward/wide_sums.h"

namespace flashxla::attention_backward {
namespace {

constexpr int kThreads = 2 * attention::kWarpgroupThreads;

// Lane i of four has element i of four vectors; afterwards it has vector i.
__device__ void Transpose4(uint32_t (&x)[4]) {
  const int lane = threadIdx.x & 3;
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool high = lane & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      uint32_t &a = x[i], &b = x[i + step];
      const uint32_t other = __shfl_xor_sync(attention::kAllLanes, high ? a : b, step);
      (high ? a : b) = other;
    }
  }
}

// A thread block per row tile and head. Each thread reads what a thread of wide's has added.
template <typename T, int kDims>
__global__ void __launch_bounds__(kThreads) SumsKernel(const __grid_constant__ Problem p) {
  const int tile = blockIdx.x, head = blockIdx.y;
  if (p.plan.shares_keys() || tile >= p.plan.row_tile_starts[p.plan.num_sequences]) return;
  constexpr int kParts = kDims / 16;  // of a thread, 16 bytes each
  constexpr int kEach = kParts / WideSumParts(kDims);
  const int lane = threadIdx.x & 31, group = threadIdx.x / attention::kWarpgroupThreads;
  const int thread = threadIdx.x % attention::kWarpgroupThreads;
  const auto* from = reinterpret_cast<const float4*>(p.sums) +
                     (int64_t{tile} * p.num_heads + head) * (kRowTile * kDims / 4) + thread;
  float4 part[kParts];
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const int place = i / kEach * 2 * kEach + group * kEach + i % kEach;
    part[i] = from[place * attention::kWarpgroupThreads];
  }
  const int sequence = attention::FindStart(p.plan.row_tile_starts, p.plan.num_sequences, tile);
  const PlannedSequence s = p.plan.sequences[sequence];
  const int query =
      (tile - p.plan.row_tile_starts[sequence]) * kRowTile + thread / 32 * 16 + lane / 4;
  const float scale = p.softmax_scale;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    T* to = reinterpret_cast<T*>(p.grad_q.data) +
            (s.first_query + query + 8 * r) * p.grad_q.stride_token + head * p.grad_q.stride_head;
#pragma unroll
    for (int i = 0; i < kParts; i += 4) {
      uint32_t pairs[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float4& x = part[i + j];
        pairs[j] = r == 0 ? attention::Pack<T>(x.x * scale, x.y * scale)
                          : attention::Pack<T>(x.z * scale, x.w * scale);
      }
      Transpose4(pairs);
      const int d = WideColumn(kDims, group, i * 8) + lane % 4 * 8;
      if (d < p.head_size && query + 8 * r < s.num_queries) {
        *reinterpret_cast<uint4*>(to + d) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    }
  }
}

}  // namespace

void LaunchWideSums(const Problem& p, cudaStream_t stream) {
  const dim3 blocks(p.plan.num_row_tiles, p.num_heads);
  attention::WithInstance<attention::WideHeadSizes>(
      p.dtype, p.LargerHeadSize(), false, [&](auto t, auto dims, auto) {
        using T = typename decltype(t)::type;
        SumsKernel<T, decltype(dims)::value><<<blocks, kThreads, 0, stream>>>(p);
      });
}

}  // namespace flashxla::attention_backward
