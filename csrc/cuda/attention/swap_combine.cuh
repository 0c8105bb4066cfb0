// How swap's blocks combine their partial results without another kernel: the block that has a q
// tile's last part waits for the others and combines.
//
// Each partial result has a flag in the workspace, which nobody cleared before the call: a flag is
// set if it holds the call's tag, a random number of 64 bits. It is cleared when it was seen, so
// that the same call may run again, as in a CUDA graph. A block waits when all of its steps are
// done, for blocks that start before it and wait for none after them.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_COMBINE_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_COMBINE_CUH_

#include "cuda/attention/combine.cuh"
#include "cuda/attention/swap_shared.cuh"

namespace flashxla::attention {

#if defined(FLASHXLA_HOPPER)

// Says that the warpgroup has stored a partial result. All of its threads must call it.
__device__ inline void SetFlag(uint64_t* flag, uint64_t tag) {
  SyncNamed(SwapBarrier(0), kWarpgroupThreads);
  if (threadIdx.x == 0) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(tag) : "memory");
  }
}

__device__ inline void AwaitFlag(uint64_t* flag, uint64_t tag) {
  uint64_t now;
  do {
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(flag) : "memory");
  } while (now != tag);
  *flag = 0;
}

// Combines the q tile whose last part is this block's, if there is one. The warpgroup must call it
// after it stored that part. All other warps call it, too, without parts: so the multiprocessor has
// the instructions by the time they are needed.
template <int kDims>
__device__ void CombineParts(const SwapProblem& w, const SplitWorkspace& workspace, int kv_head,
                             int warp, const SplitTile& tile) {
  const int first_block = static_cast<int>(blockIdx.y) - tile.num_parts + 1;
  if (tile.num_parts > 0) {
    for (int n = threadIdx.x; n < tile.num_parts - 1; n += kWarpgroupThreads) {
      AwaitFlag(workspace.flag(kv_head, first_block + n, n == 0 && tile.back), w.tag);
    }
    SyncNamed(SwapBarrier(0), kWarpgroupThreads);
  }
  const int rows = tile.num_parts == 0 ? warp + 1
                                       : min(tile.num_queries * w.p.group_size - tile.first_row,
                                             workspace.shape.rows);
#pragma unroll 1
  for (int row = warp; row < rows; row += kSwapGroupWarps) {
    CombineRow<kDims, kDims <= 128 ? 16 : 8>(w.p, workspace, kv_head, first_block, tile, row);
  }
}

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_COMBINE_CUH_
