// What is left after the engines: merging the tiles that kSplit shared out, and the rows outside
// every sequence.
#include "cuda/attention/dispatch.cuh"
#include "cuda/attention/engines.h"
#include "cuda/attention/split.cuh"

namespace flashxla::attention {
namespace {

constexpr int kThreads = 32 * kSplitRows;

// Whether a token is outside every sequence. A warp looks at 32 at a time.
__device__ bool IsIdle(const Problem& p, int token) {
  return token < p.num_tokens && p.plan.token_sequence[token] < 0;
}

// Rows outside every sequence: out 0, LSE -inf.
__device__ void StoreIdleRows(const Problem& p, int first, bool is_idle) {
  const int lane = threadIdx.x & 31;
  uint32_t idle = __ballot_sync(~0u, is_idle);
  while (idle != 0) {
    const int token = first + __ffs(idle) - 1;
    idle &= idle - 1;
    const int elements = p.num_heads * p.head_size;
    for (int i = lane; i < elements; i += 32) {
      p.StoreOut(token, i / p.head_size, i % p.head_size, 0.f);
    }
    for (int head = lane; head < p.num_heads; head += 32) p.StoreLse(token, head, -INFINITY);
  }
}

// Merges the tile that begins in a block and goes on in others. A warp a row.
template <int kDims>
__device__ void MergeTile(const Problem& p, const SplitWorkspace<kDims>& workspace, int kv_head,
                          int block) {
  const SplitMerge merge = workspace.merge(kv_head, block);
  const int lane = threadIdx.x & 31, row = threadIdx.x / 32;
  const int r = merge.first_row + row, num_parts = merge.num_parts;
  if (num_parts == 0 || r >= merge.num_queries * p.group_size) return;
  auto part = [&](int n) { return workspace.partial(kv_head, block + n, n == 0 && merge.back); };
  constexpr int kEach = kDims / 32;  // dims of a lane
  constexpr int kAhead = 8;          // parts whose values are fetched together, ahead of their use
  float ahead[kAhead][kEach];
  auto fetch = [&](int from) {
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const float* values = part(min(from + n, num_parts - 1)) + row * kDims + lane;
#pragma unroll
      for (int i = 0; i < kEach; ++i) ahead[n][i] = values[i * 32];
    }
  };
  fetch(0);
  float top = -INFINITY, sum = 0.f, out[kEach] = {};
#pragma unroll 1
  for (int base = 0; base < num_parts; base += 32) {
    // Lane n looks after part base + n.
    const int count = min(num_parts - base, 32);
    float part_top = -INFINITY, part_sum = 0.f;
    if (lane < count) {
      part_top = part(base + lane)[kSplitRows * kDims + row];
      part_sum = part(base + lane)[kSplitRows * (kDims + 1) + row];
    }
    float new_top = part_top;
    for (int step = 16; step > 0; step /= 2) {
      new_top = fmaxf(new_top, __shfl_xor_sync(~0u, new_top, step));
    }
    new_top = fmaxf(new_top, top);
    const float shift = new_top == -INFINITY ? 0.f : new_top;
    const float old_factor = exp2f(top - shift);
    const float factor = exp2f(part_top - shift);  // 0 where there is no part
    top = new_top;
    part_sum *= factor;
    for (int step = 16; step > 0; step /= 2) part_sum += __shfl_xor_sync(~0u, part_sum, step);
    sum = sum * old_factor + part_sum;
    for (float& x : out) x *= old_factor;
#pragma unroll 1
    for (int n0 = 0; n0 < count; n0 += kAhead) {
      float now[kAhead][kEach];
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) now[n][i] = ahead[n][i];
      }
      if (base + n0 + kAhead < num_parts) fetch(base + n0 + kAhead);
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        const float f = __shfl_sync(~0u, factor, n0 + n);
#pragma unroll
        for (int i = 0; i < kEach; ++i) out[i] += f == 0.f ? 0.f : now[n][i] * f;
      }
    }
  }
  const int token = merge.first_query + r / p.group_size;
  const int head = kv_head * p.group_size + r % p.group_size;
  const float2 end = FinishRow(top, sum, p.Sink(head));
  const float whole = end.x * p.ValueScale(merge.index, kv_head);
  if (lane == 0) p.StoreLse(token, head, end.y);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (i * 32 + lane < p.head_size) p.StoreOut(token, head, i * 32 + lane, out[i] * whole);
  }
}

template <int kDims>
__global__ void __launch_bounds__(kThreads)
    FinishKernel(const __grid_constant__ Problem p, const SplitWorkspace<kDims> workspace) {
  AllowNext();
  AwaitPrevious();
  const int lane = threadIdx.x & 31;
  int first = static_cast<int>(blockIdx.x * kThreads + threadIdx.x) / 32 * 32;
  bool is_idle = IsIdle(p, first + lane);  // early: nothing waits for it
  for (int i = blockIdx.x; i < workspace.blocks * p.num_kv_heads; i += gridDim.x) {
    MergeTile<kDims>(p, workspace, i % p.num_kv_heads, i / p.num_kv_heads);
  }
  while (first < p.num_tokens) {
    StoreIdleRows(p, first, is_idle);
    first += static_cast<int>(gridDim.x) * kThreads;
    is_idle = IsIdle(p, first + lane);
  }
}

}  // namespace

void LaunchFinish(const Problem& p, int64_t engines, float* workspace, cudaStream_t stream) {
  WithInstance(FLASHXLA_BF16, p.head_size, false, [&](auto, auto dims, auto) {
    constexpr int kDims = decltype(dims)::value;
    const SplitWorkspace<kDims> split(workspace, p.num_kv_heads,
                                      engines & kUseSplit ? SplitBlocksOf(engines) : 0);
    LaunchEarly(FinishKernel<kDims>, 2 * NumMultiprocessors(), kThreads, 0, stream, p, split);
  });
}

}  // namespace flashxla::attention
