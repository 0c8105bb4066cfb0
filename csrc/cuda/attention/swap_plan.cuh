// The plan that swap makes itself (own_plan.cuh): a thread block's steps, and the tokens that no
// engine computes.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_PLAN_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_PLAN_CUH_

#include "cuda/attention/combine.cuh"
#include "cuda/attention/own_plan.cuh"
#include "cuda/attention/swap_shared.cuh"

namespace flashxla::attention {

#if defined(FLASHXLA_HOPPER)

// Asks for what the kernel accesses first, partial results included: where other kernels ran since
// the last call, the first access to a page of memory takes long. This may come before
// WaitForPrevious().
__device__ inline void PrefetchInputs(const Problem& p, const SplitWorkspace& workspace,
                                      int kv_head) {
  const int block = blockIdx.y;
  if (threadIdx.x == 0) PrefetchL2(workspace.flag(kv_head, block, false));
  if (threadIdx.x == 1) PrefetchL2(workspace.partial(kv_head, block, false));
  if (threadIdx.x == 2) PrefetchL2(p.out.data);
  if (threadIdx.x == 3 && !p.makes_plan) PrefetchL2(&p.plan.few_blocks[block]);
  constexpr int kEntries = 128 / sizeof(int32_t);  // of a line
  const IndexTensors& index = p.index;
  const int first = threadIdx.x * kEntries;
  if (p.makes_plan && first < index.num_sequences) {
    PrefetchL2(&index.cu_seqlens_q.data[first * index.cu_seqlens_q.stride]);
    if (index.seqused_k.data != nullptr) {
      PrefetchL2(&index.seqused_k.data[first * index.seqused_k.stride]);
    }
  }
  // Each block asks for other lines of the block table and the queries.
  const int64_t line = (int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x;
  if (line * kEntries < p.block_table.num_entries) {
    PrefetchL2(&p.block_table.data[line * kEntries]);
  }
  if (line * 128 < p.q_bytes) PrefetchL2(p.q.data + line * 128);
}

// Makes the plan, and returns the steps of thread block `block`. The threads of the block must call
// it together. Each warp finds the steps itself: they need not wait for each other once more.
template <typename S>
__device__ FewBlock MakeOwnPlan(const SwapProblem& w, const SwapShared<S>& shared, int block) {
  constexpr int kRows = S::kMaxRows;
  const Problem& p = w.p;
  const int lane = threadIdx.x & 31, num_sequences = p.index.num_sequences;
  const int groups = (num_sequences + 31) / 32;
  PlannedSequence* const sequences = shared.sequences();
  auto note = [&](int group, const PlannedSequence& s) {
    const OwnTotals sums =
        OwnTotals(FewSteps(s, p.group_size, kRows), LeastFewShare(s, p.group_size, kRows)).OfWarp();
    if (lane == 0) shared.totals()[group] = sums;
  };
  if (!ReadOwnSequences(p, sequences, note)) {
    for (int i = threadIdx.x; i - lane < num_sequences; i += S::kThreads) {
      note(i / 32, i < num_sequences ? sequences[i] : PlannedSequence{});
    }
    __syncthreads();
  }
  auto steps_of = [&](int i) {
    return i < num_sequences ? FewSteps(sequences[i], p.group_size, kRows) : 0;
  };
  // Of sequences, and of every 32 of them, up to that of the lane.
  int steps = steps_of(lane), end = InclusiveSum(steps);
  const OwnTotals of_group = lane < groups ? shared.totals()[lane] : OwnTotals();
  const int group_end = groups > 1 ? InclusiveSum(of_group.steps) : 0;
  const OwnTotals all = of_group.OfWarp();
  const int total = all.steps;
  const FewShare shares(total, w.num_blocks.Quotient(total + p.few.num_blocks - 1), all.least,
                        p.few.num_lone_blocks);
  const int share = all.most_steps == all.fewest_steps
                        ? shares.Whole(sequences[0].num_kv_tiles, true)
                        : shares.equal;
  const int first = block * share;
  if (first >= total) return {};
  int group = 0;  // of the first step's sequence
  if (groups > 1) group = __ffs(__ballot_sync(kAllLanes, group_end > first)) - 1;
  if (group > 0) {
    steps = steps_of(32 * group + lane);
    end = __shfl_sync(kAllLanes, group_end, group - 1) + InclusiveSum(steps);
  }
  const int owner = __ffs(__ballot_sync(kAllLanes, end > first)) - 1, index = 32 * group + owner;
  const int start = FromFirstLane(__shfl_sync(kAllLanes, end - steps, owner));
  return FewBlockAt(ReadTogether(&sequences[index]), index, start, first, min(first + share, total),
                    share, kRows);
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
  int served = 0;  // tokens of sequences that see keys: most often all
#pragma unroll 1
  for (int i = threadIdx.x & 31; i < p.index.num_sequences; i += 32) {
    served += sequences[i].role == kIdle ? 0 : sequences[i].num_queries;
  }
  if (__reduce_add_sync(kAllLanes, served) == p.num_tokens) return;
  for (int token = first; token < p.num_tokens; token += count) {
    const int mark = MarkOfToken(p, sequences, token);
    if (mark < 0) StoreIdle(p, token, IsKeyless(mark));
  }
}

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_PLAN_CUH_
