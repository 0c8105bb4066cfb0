// What is left after the engines: merging the tiles that kSplit shared out, and the rows outside
// every sequence.
#include "cuda/attention/dispatch.cuh"
#include "cuda/attention/engines.h"
#include "cuda/attention/split.cuh"

namespace flashxla::attention {
namespace {

constexpr int kThreads = 32 * kSplitRows;

// Rows outside every sequence: out 0, LSE -inf. A warp looks at 32 tokens at a time.
__device__ void StoreIdleRows(const Problem& p) {
  const int lane = threadIdx.x & 31;
  const int warp = (blockIdx.x * kThreads + threadIdx.x) / 32;
  const int num_warps = gridDim.x * kThreads / 32;
  for (int first = warp * 32; first < p.num_tokens; first += num_warps * 32) {
    const int token = first + lane;
    const bool is_idle = token < p.num_tokens && p.plan.token_sequence[token] < 0;
    uint32_t idle = __ballot_sync(~0u, is_idle);
    while (idle != 0) {
      const int t = first + __ffs(idle) - 1;
      idle &= idle - 1;
      const int elements = p.num_heads * p.head_size;
      for (int i = lane; i < elements; i += 32) {
        p.StoreOut(t, i / p.head_size, i % p.head_size, 0.f);
      }
      for (int head = lane; head < p.num_heads; head += 32) p.StoreLse(t, head, -INFINITY);
    }
  }
}

// Merges the tile that lies across the end of block `first`, if it is the first end in that tile. A
// warp a row.
template <int kDims>
__device__ void MergeTile(const Problem& p, const float* workspace, int kv_head, int first,
                          int split_blocks) {
  const int total = p.plan.totals[kSplit];
  const int share = SplitShare(total, split_blocks);
  const int boundary = (first + 1) * share;
  if (boundary >= total) return;
  SplitTile tile;
  tile.Find(p, boundary);
  if (tile.start >= boundary || tile.start < first * share) return;
  const int lane = threadIdx.x & 31, row = threadIdx.x / 32;
  const int r = tile.first_row() + row;
  if (r >= tile.sequence.num_queries * p.group_size) return;
  const int num_parts = (tile.start + tile.num_steps - 1) / share - first + 1;
  // Part n lies in block first + n; only the first can begin inside its block.
  auto part = [&](int n) {
    const bool back = n == 0 && tile.start != first * share;
    return workspace + PartialSlot(kv_head, first + n, split_blocks, back) * kPartialFloats<kDims>;
  };
  constexpr int kEach = kDims / 32;  // dims of a lane
  float top = -INFINITY, sum = 0.f, out[kEach] = {};
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
    const float factor = exp2f(part_top - shift);
    top = new_top;
    part_sum *= factor;
    for (int step = 16; step > 0; step /= 2) part_sum += __shfl_xor_sync(~0u, part_sum, step);
    sum = sum * old_factor + part_sum;
    for (float& x : out) x *= old_factor;
#pragma unroll 8
    for (int n = 0; n < count; ++n) {
      const float f = __shfl_sync(~0u, factor, n);
      const float* values = part(base + n) + row * kDims;
#pragma unroll
      for (int i = 0; i < kEach; ++i) out[i] += values[i * 32 + lane] * f;
    }
  }
  const int token = tile.sequence.first_query + r / p.group_size;
  const int head = kv_head * p.group_size + r % p.group_size;
  const float2 end = FinishRow(top, sum, p.Sink(head));
  const float whole = end.x * p.ValueScale(tile.index, kv_head);
  if (lane == 0) p.StoreLse(token, head, end.y);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (i * 32 + lane < p.head_size) p.StoreOut(token, head, i * 32 + lane, out[i] * whole);
  }
}

template <int kDims>
__global__ void __launch_bounds__(kThreads)
    FinishKernel(const __grid_constant__ Problem p, const float* workspace, int split_blocks) {
  StoreIdleRows(p);
  for (int i = blockIdx.x; i < split_blocks * p.num_kv_heads; i += gridDim.x) {
    MergeTile<kDims>(p, workspace, i % p.num_kv_heads, i / p.num_kv_heads, split_blocks);
  }
}

}  // namespace

void LaunchFinish(const Problem& p, int64_t engines, const float* workspace, cudaStream_t stream) {
  const int split_blocks = engines & kUseSplit ? SplitBlocks(p.head_size, p.num_kv_heads) : 0;
  WithInstance(FLASHXLA_BF16, p.head_size, false, [&](auto, auto dims, auto) {
    FinishKernel<decltype(dims)::value>
        <<<2 * NumMultiprocessors(), kThreads, 0, stream>>>(p, workspace, split_blocks);
  });
}

}  // namespace flashxla::attention
