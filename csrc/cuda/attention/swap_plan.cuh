// The plan of a call of few sequences, all with few queries: each thread block of swap makes what
// it needs of it, so that no other kernel has to come first.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_PLAN_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_PLAN_CUH_

#include "cuda/attention/plan_sequences.cuh"
#include "cuda/attention/swap_shared.cuh"

namespace flashxla::attention {

#if defined(FLASHXLA_HOPPER)

// Lists the sequences in shared memory. The threads of the block must call it together, and are at
// least as many as there are sequences.
__device__ inline void ListSequences(const Problem& p, PlannedSequence* sequences) {
  const IndexTensors& index = p.index;
  const int i = threadIdx.x, num_sequences = NumSequences(index);
  PlannedSequence s = {};
  bool grows = true, has_keys = false;
  if (i < num_sequences) {
    const int begin = At(index.cu_seqlens_q, i), end = At(index.cu_seqlens_q, i + 1);
    has_keys = ReadKeys(index, i, &s);
    grows = AreQueries(index, begin, end);
    s.first_query = begin, s.num_queries = end - begin;
  }
  if (!__syncthreads_and(grows)) {
    if (i < 32) ReadUnsoundQueries(index, num_sequences, sequences);
    __syncthreads();
    if (i < num_sequences) s.num_queries = sequences[i].num_queries;
  }
  if (has_keys && s.num_queries > 0) {
    const KeyRange keys = SetKvTiles(p.window, &s);
    s.role = keys.begin < keys.end ? kFew : kIdle;
  } else {
    s = {};
  }
  if (i < index.num_sequences) sequences[i] = s;
  __syncthreads();
}

// The steps of thread block `block`. All lanes of a warp must call it; each has four sequences.
__device__ inline FewBlock FindFewBlock(const Problem& p, const PlannedSequence* sequences,
                                        int block) {
  constexpr int kEach = kMaxOwnSequences / 32, kRows = kSplitQTileRows;
  const int lane = threadIdx.x & 31;
  int steps[kEach], sum = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int i = lane * kEach + j;
    steps[j] = i < p.index.num_sequences ? FewSteps(sequences[i], p.group_size, kRows) : 0;
    sum += steps[j];
  }
  const int end = InclusiveSum(sum);
  const int total = __shfl_sync(kAllLanes, end, 31);
  const int first_steps = __shfl_sync(kAllLanes, steps[0], 0);
  int start = end - sum, starts[kEach];
  bool alike = true;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    starts[j] = start;
    const bool is_padding = start == total;
    alike = alike && (is_padding || steps[j] == first_steps);
    start += steps[j];
  }
  const FewShare shares(total, p.num_few_blocks);
  const bool all_alike = __all_sync(kAllLanes, alike);
  const int share = all_alike && !shares.fixed() && total > 0
                        ? shares.Whole(sequences[0].num_kv_tiles)
                        : shares.equal;
  const int first = block * share;
  int mine = -1, my_start = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    if (starts[j] <= first && first < starts[j] + steps[j]) mine = j, my_start = starts[j];
  }
  // A block without steps takes the same way. If it left early, ptxas would not know that the lanes
  // are together from here on, and move the addresses of all matrix instructions between registers.
  const int owner = max(__ffs(__ballot_sync(kAllLanes, mine >= 0)) - 1, 0);
  const int index = max(owner * kEach + __shfl_sync(kAllLanes, mine, owner), 0);
  my_start = __shfl_sync(kAllLanes, my_start, owner);
  return FewBlockAt(ReadTogether(&sequences[index]), index, my_start, min(first, total),
                    min(first + share, total), share, kRows);
}

// As the plan's token_sequence.
__device__ inline int MarkOfToken(const Problem& p, const PlannedSequence* sequences, int token) {
  for (int i = 0; i < p.index.num_sequences; ++i) {
    const PlannedSequence& s = sequences[i];
    if (token >= s.first_query && token - s.first_query < s.num_queries) return MarkOf(s.role, i);
  }
  return kNoSequence;
}

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_PLAN_CUH_
