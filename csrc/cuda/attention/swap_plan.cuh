// The plan of a call of few sequences, all with few queries: each thread block of swap makes what
// it needs of it, so that no other kernel has to come first.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_PLAN_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_PLAN_CUH_

#include "cuda/attention/combine.cuh"
#include "cuda/attention/plan_sequences.cuh"
#include "cuda/attention/swap_shared.cuh"

namespace flashxla::attention {

#if defined(FLASHXLA_HOPPER)

// Makes the plan in shared memory, with the steps of thread block `block`. The threads of the block
// must call it together, and are at least as many as there are sequences: each has one.
template <int kQTileRows>
__device__ void MakeOwnPlan(const Problem& p, OwnPlan* plan, int block) {
  const IndexTensors& index = p.index;
  const int i = threadIdx.x, warp = i / 32, num_sequences = NumSequences(index);
  PlannedSequence s = {};
  bool grows = true, has_keys = false;
  if (i < num_sequences) {
    const int begin = At(index.cu_seqlens_q, i), end = At(index.cu_seqlens_q, i + 1);
    has_keys = ReadKeys(index, i, &s);
    grows = AreQueries(index, begin, end);
    s.first_query = begin, s.num_queries = end - begin;
  }
  if (!__syncthreads_and(grows)) {
    if (i < 32) ReadUnsoundQueries(index, num_sequences, plan->sequences);
    __syncthreads();
    if (i < num_sequences) s.num_queries = plan->sequences[i].num_queries;
  }
  if (has_keys && s.num_queries > 0) {
    const KeyRange keys = SetKvTiles(p.window, &s);
    s.role = keys.begin < keys.end ? kFew : kIdle;
  } else {
    s = {};
  }
  const int steps = FewSteps(s, p.group_size, kQTileRows);
  int end = InclusiveSum(steps), total = 0, least = 0;
  if (i < index.num_sequences) plan->sequences[i] = s;
  if (i == 0) plan->first_steps = steps;
  if (i % 32 == 31) plan->warp_steps[warp] = end;
  const unsigned least_share = LeastFewShare(s, p.group_size, kQTileRows);
  plan->warp_least[warp] = __reduce_max_sync(kAllLanes, least_share);
  __syncthreads();
#pragma unroll
  for (int other = 0; other < kMaxOwnSequences / 32; ++other) {
    const int of_warp = plan->warp_steps[other];
    total += of_warp;
    if (other < warp) end += of_warp;
    least = max(least, plan->warp_least[other]);
  }
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
