// The last kernel of a call: combines the partial results of q tiles whose keys were split, and
// writes the rows that see no key.
#include "cuda/attention/dispatch.cuh"
#include "cuda/attention/engines.h"
#include "cuda/attention/split.cuh"
#include "cuda/attention/warp.cuh"

namespace flashxla::attention {
namespace {

constexpr int kThreads = 32 * kFewQTileRows;

// Writes a token that no engine computes: out 0, LSE -inf or the sink. One warp per token.
__device__ void StoreIdle(const Problem& p, int token, bool in_sequence) {
  const int lane = threadIdx.x & 31;
  const int size = p.out_dtype == FLASHXLA_F32 ? 4 : 2;
  char* row = p.out.data + token * p.out.stride_token * size;
  const int64_t stride = p.out.stride_head * size;
  const int vectors = p.v_head_size * size / 16;
  const bool aligned = p.out.stride_dim == 1 && p.v_head_size * size % 16 == 0 &&
                       stride % 16 == 0 && reinterpret_cast<uintptr_t>(row) % 16 == 0;
  for (int head = 0; head < p.num_heads; ++head) {
    if (aligned) {
      for (int i = lane; i < vectors; i += 32) {
        reinterpret_cast<uint4*>(row + head * stride)[i] = make_uint4(0, 0, 0, 0);
      }
    } else {
      for (int d = lane; d < p.v_head_size; d += 32) p.StoreOut(token, head, d, 0.f);
    }
    if (lane == 0) p.StoreLse(token, head, in_sequence ? p.Sink(head) : -INFINITY);
  }
}

// Combines the partial results of the q tile that begins in a block and continues in the next ones.
// One warp per row.
template <int kDims>
__device__ void CombineTile(const Problem& p, const SplitWorkspace<kDims>& workspace, int kv_head,
                            int block) {
  const SplitTile tile = workspace.tile(kv_head, block);
  const int lane = threadIdx.x & 31, row = threadIdx.x / 32;
  const int r = tile.first_row + row, num_parts = tile.num_parts;
  if (num_parts == 0 || r >= tile.num_queries * p.group_size) return;
  auto part = [&](int n) { return workspace.partial(kv_head, block + n, n == 0 && tile.back); };
  constexpr int kEach = kDims / 32;  // dims of a lane
  constexpr int kAhead = 8;  // parts whose values are fetched together, before they are used
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
  float row_max = -INFINITY, row_sum = 0.f, out[kEach] = {};
#pragma unroll 1
  for (int base = 0; base < num_parts; base += 32) {
    // Lane n handles part base + n.
    const int count = min(num_parts - base, 32);
    float part_max = -INFINITY, part_sum = 0.f;
    if (lane < count) {
      part_max = part(base + lane)[Partial<kDims>::kRowMax + row];
      part_sum = part(base + lane)[Partial<kDims>::kRowSum + row];
    }
    float new_max = part_max;
    for (int step = 16; step > 0; step /= 2) {
      new_max = fmaxf(new_max, __shfl_xor_sync(kAllLanes, new_max, step));
    }
    new_max = fmaxf(new_max, row_max);
    const float shift = new_max == -INFINITY ? 0.f : new_max;
    const float old_factor = exp2f(row_max - shift);
    const float factor = exp2f(part_max - shift);  // 0 where there is no part
    row_max = new_max;
    part_sum *= factor;
    for (int step = 16; step > 0; step /= 2) part_sum += __shfl_xor_sync(kAllLanes, part_sum, step);
    row_sum = row_sum * old_factor + part_sum;
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
        const float f = __shfl_sync(kAllLanes, factor, n0 + n);
#pragma unroll
        for (int i = 0; i < kEach; ++i) out[i] += f == 0.f ? 0.f : now[n][i] * f;
      }
    }
  }
  const int token = tile.first_query + r / p.group_size;
  const int head = kv_head * p.group_size + r % p.group_size;
  const float2 end = FinishRow(row_max, row_sum, p.Sink(head));
  const float whole = end.x * p.ValueScale(tile.index, kv_head);
  if (lane == 0) p.StoreLse(token, head, end.y);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (i * 32 + lane < p.v_head_size) p.StoreOut(token, head, i * 32 + lane, out[i] * whole);
  }
}

template <int kDims>
__global__ void __launch_bounds__(kThreads)
    CombineKernel(const __grid_constant__ Problem p, const SplitWorkspace<kDims> workspace) {
  TriggerNext();
  WaitForPrevious();
  int token = static_cast<int>(blockIdx.x * kThreads + threadIdx.x) / 32;
  int sequence =
      token < p.num_tokens ? p.plan.token_sequence[token] : 0;  // early, to hide its latency
  for (int i = blockIdx.x; i < workspace.blocks * p.num_kv_heads; i += gridDim.x) {
    CombineTile<kDims>(p, workspace, i % p.num_kv_heads, i / p.num_kv_heads);
  }
  while (token < p.num_tokens) {
    if (sequence < 0) StoreIdle(p, token, IsKeyless(sequence));
    token += static_cast<int>(gridDim.x) * kThreads / 32;
    if (token < p.num_tokens) sequence = p.plan.token_sequence[token];
  }
}

}  // namespace

void LaunchCombine(const Problem& p, void* workspace, cudaStream_t stream) {
  WithInstance(FLASHXLA_BF16, p.v_head_size, false, [&](auto, auto dims, auto) {
    constexpr int kDims = decltype(dims)::value;
    const SplitWorkspace<kDims> split(workspace, p.num_kv_heads, p.num_few_blocks);
    LaunchDependent(CombineKernel<kDims>, 2 * NumMultiprocessors(), kThreads, 0, stream, p, split);
  });
}

}  // namespace flashxla::attention
