// swap's kernel. Producer warps fill the stages, by TMA or by copies of their own; one or two
// warpgroups compute.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_KERNEL_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_KERNEL_CUH_

#include <type_traits>

#include "cuda/attention/swap_combine.cuh"
#include "cuda/attention/swap_combine_many.cuh"
#include "cuda/attention/swap_copied.cuh"
#include "cuda/attention/swap_plan.cuh"
#include "cuda/attention/swap_stream.cuh"
#include "cuda/attention/swap_tile.cuh"
#include "cuda/launch.h"

namespace flashxla::attention {

#if defined(FLASHXLA_HOPPER)

// Computes the rest of the current q tile of `at`, as far as it is this block's. Each warpgroup has
// kRows rows.
template <typename S, int kRows>
__device__ void ComputeTile(const SwapProblem& w, const SwapShared<S>& shared,
                            const SplitWorkspace& workspace, const FewBlock& block, int kv_head,
                            int warp, Cursor& at, int& stage, uint32_t& parity) {
  SwapTile<S, kRows> tile(shared, warp, at);
  const bool idle = S::kGroups > 1 && tile.first_row >= at.sequence.num_queries * w.p.group_size;
  if (!idle) tile.Begin(w, at, kv_head);
  const int segment = at.step, segment_end = min(at.tile_end, at.end);
#pragma unroll 1
  for (int key = at.first_key(); at.step < segment_end; ++at.step, key += kFewKvTileKeys) {
    if constexpr (S::kStreams) {
      const int mask_index = (at.step - block.begin) % S::kStages;
      tile.Stream(w.p, mask_index, key, at.step == segment, stage, parity);
    } else {
      WaitBarrier(shared.keys_full(stage), parity);
      auto await_values = [&] {
        WaitBarrier(shared.values_full(stage), parity);
        ZeroValues(shared, stage);
      };
      idle ? await_values() : tile.Step(w.p, stage, key, at.step == segment, await_values);
      Release(shared.empty(stage));
      if (++stage == S::kStages) stage = 0, parity ^= 1;
    }
  }
  const bool whole = segment == at.tile_start && segment_end == at.tile_end;
  const bool back = segment != block.begin;
  if (!idle) {
    tile.End();
    whole
        ? tile.Store(w, at, kv_head)
        : tile.StorePartial(w.p, at, workspace.shape, workspace.partial(kv_head, blockIdx.y, back));
  }
  // The last part needs no flag: its own block combines.
  if (segment_end < at.tile_end) {
    SyncNamed(kSwapConsumers, S::kConsumerThreads);
    if (threadIdx.x == 0) SetFlag(workspace.flag(kv_head, blockIdx.y, back), w.tag);
  }
}

// Computes the block's steps.
template <typename S>
__device__ void SwapConsume(const SwapProblem& w, const SwapShared<S>& shared,
                            const SplitWorkspace& workspace, const SequenceList& sequences,
                            const FewBlock& block, int kv_head, int warp) {
  Cursor at(w.p, sequences, block);
  int stage = 0;
  uint32_t parity = 0;
#pragma unroll 1
  while (true) {  // q tiles
    const int rows = at.sequence.num_queries * w.p.group_size - at.first_row;
    auto compute = [&](auto count) {
      ComputeTile<S, decltype(count)::value>(w, shared, workspace, block, kv_head, warp, at, stage,
                                             parity);
    };
    if (rows <= 8 * S::kGroups) {
      compute(std::integral_constant<int, 8>{});
    } else if constexpr (S::kGroups == 1) {
      compute(std::integral_constant<int, S::kGroupRows>{});
    } else if (rows <= 32) {
      compute(std::integral_constant<int, 16>{});
    } else {
      rows <= 64 ? compute(std::integral_constant<int, 32>{})
                 : compute(std::integral_constant<int, S::kGroupRows>{});
    }
    if (at.step == at.end) return;
    --at.step;
    at.Next(w.p);
  }
}

#endif  // FLASHXLA_HOPPER

template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kThreadBlocks)
    SwapKernel(const __grid_constant__ SwapProblem w, const SplitWorkspace workspace) {
#if defined(FLASHXLA_HOPPER)
  extern __shared__ __align__(1024) char dynamic[];
  const SwapShared<S> shared(dynamic);
  const int kv_head = blockIdx.x;
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0);
  if (!w.p.few_follows) {
    TriggerNext();  // else at the end, as wide does
  } else if (w.p.few_left != nullptr && __ldcg(w.p.few_left) == 0) {
    // It is there: the kernel before this one wrote it before it let this one start.
    WaitForPrevious();
    return;
  }
  if (threadIdx.x == 0) {
    if (shared.address % 1024 != 0) __trap();  // as the swizzle needs it
    if constexpr (!S::kCopied) PrefetchMap(&w.k), PrefetchMap(&w.v);
    shared.InitBarriers();
  }
  __syncthreads();
  PrefetchInputs(w.p, workspace, kv_head);
  if (!w.p.few_follows) WaitForPrevious();
  SequenceList sequences = w.p.plan.sequences;
  FewBlock block;
  const bool own_plan = S::kMakesPlan && w.p.makes_plan;
  if (own_plan) {
    block = MakeOwnPlan(w, shared, blockIdx.y);
    sequences = shared.sequences();
  } else {
    block = ReadTogether(&w.p.plan.few_blocks[blockIdx.y]);
  }
  const bool works = block.begin < block.end;
  SplitTile ended = {};
  bool combines_many = false;
  if (works && warp < S::kConsumerWarps) {
    ended = Cursor(w.p, sequences, block).Ended(blockIdx.y);
    const int ended_rows = ended.num_queries * w.p.group_size - ended.first_row;
    combines_many = S::kCombinesMany || ended_rows > kMostRowsAtOnce;
  }
  if (warp >= S::kConsumerWarps) {
    if constexpr (S::kMoveRegisters) LowerRegisters<S::kProducerRegisters>();
    const int producer = warp - S::kConsumerWarps;
    if (producer < S::kProducerWarps && works) {
      if constexpr (S::kCopied) {
        SwapCopy(w, shared, sequences, block, kv_head, producer);
      } else {
        SwapProduce(w, shared, sequences, block, kv_head);
      }
    }
    if (warp == S::kThreads / 32 - 1) {
      const int first = blockIdx.y * gridDim.x + kv_head, count = gridDim.x * gridDim.y;
      own_plan ? StoreIdleTokens(w.p, shared.sequences(), first, count)
               : StoreIdleTokens(w.p, first, count);
    }
  } else {
    if constexpr (S::kMoveRegisters) RaiseRegisters<S::kConsumerRegisters>();
    if (works) {
      SwapConsume(w, shared, workspace, sequences, block, kv_head, warp);
      // The usual way's instructions come first: they take long to arrive.
      if (__builtin_expect(combines_many, S::kCombinesMany)) {
        CombineManyRows(w, shared, workspace, kv_head, warp, ended);
      }
    }
  }
  if constexpr (!S::kCombinesMany) {
    const bool combines = ended.num_parts > 0 && !combines_many, warms = warp >= S::kConsumerWarps;
    if (works && (combines || warms)) CombineParts(w, shared, workspace, kv_head, warp, ended);
  }
  if (w.p.few_follows) WaitForPrevious();
#endif
}

template <typename S>
void LaunchSwapKernel(const SwapProblem& w, void* workspace, cudaStream_t stream) {
  LaunchDependent(SwapKernel<S>, dim3(w.p.num_kv_heads, w.p.few.num_blocks), S::kThreads, S::kBytes,
                  stream, w, SplitWorkspace(w.p, workspace));
}

// The same of the instances of SwapKind::kCopied, which are compiled by themselves.
void LaunchSwapCopied(const SwapProblem& w, void* workspace, cudaStream_t stream);

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_KERNEL_CUH_
