// The plan that swap makes itself (own_plan.cuh): a thread block's steps, and the tokens that no
// engine computes.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_PLAN_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_PLAN_CUH_

#include "cuda/attention/combine.cuh"
#include "cuda/attention/own_plan.cuh"
#include "cuda/attention/swap_shared.cuh"

namespace flashxla::attention {

#if defined(FLASHXLA_HOPPER)

// Makes the plan in shared memory, with the steps of thread block `block`. The threads of the block
// must call it together.
template <int kQTileRows>
__device__ void MakeOwnPlan(const Problem& p, OwnPlan* plan, int block) {
  const int i = threadIdx.x, warp = i / 32;
  const PlannedSequence s = ReadOwnSequences(p, plan->sequences);
  const int steps = FewSteps(s, p.group_size, kQTileRows);
  if (i == 0) plan->first_steps = steps;
  const unsigned least_share = LeastFewShare(s, p.group_size, kQTileRows);
  const unsigned of_warp = __reduce_max_sync(kAllLanes, least_share);
  const unsigned tokens = __reduce_add_sync(kAllLanes, s.role == kIdle ? 0 : s.num_queries);
  if (warp < kOwnPlanWarps) plan->warp_least[warp] = of_warp, plan->warp_tokens[warp] = tokens;
  int end = InclusiveSum(steps), least = 0, served = 0;
  const int total = SumOverSequences(&end, plan->warp_steps);
#pragma unroll
  for (int other = 0; other < kOwnPlanWarps; ++other) {
    least = max(least, plan->warp_least[other]), served += plan->warp_tokens[other];
  }
  if (i == 0) plan->serves_all = served == p.num_tokens;
  const int start = end - steps;
  const bool is_padding = start == total;
  const bool alike = __syncthreads_and(is_padding || steps == plan->first_steps);
  const FewShare shares(total, p.num_few_blocks, least);
  const int share = alike && !shares.fixed() && total > 0
                        ? shares.Whole(plan->sequences[0].num_kv_tiles)
                        : shares.equal;
  const int first = block * share;
  // A block without steps belongs to the first thread.
  if ((start <= first && first < end) || (first >= total && i == 0)) {
    plan->block =
        FewBlockAt(s, i, start, min(first, total), min(first + share, total), share, kQTileRows);
  }
  __syncthreads();
}

// As the plan's token_sequence. All lanes of a warp must call it.
__device__ inline int MarkOfToken(const Problem& p, const PlannedSequence* sequences, int token) {
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int base = 0; base < p.index.num_sequences; base += 32) {
    const int i = base + lane;
    bool has = false;
    int mark = kNoSequence;
    if (i < p.index.num_sequences) {
      const PlannedSequence& s = sequences[i];
      has = token >= s.first_query && token - s.first_query < s.num_queries;
      mark = MarkOf(s.role, i);
    }
    const unsigned owner = __ballot_sync(kAllLanes, has);
    if (owner != 0) return __shfl_sync(kAllLanes, mark, __ffs(owner) - 1);
  }
  return kNoSequence;
}

// As StoreIdleTokens with a plan.
__device__ inline void StoreIdleTokens(const Problem& p, const PlannedSequence* sequences,
                                       int first, int count) {
  for (int token = first; token < p.num_tokens; token += count) {
    const int mark = MarkOfToken(p, sequences, token);
    if (mark < 0) StoreIdle(p, token, IsKeyless(mark));
  }
}

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_PLAN_CUH_
