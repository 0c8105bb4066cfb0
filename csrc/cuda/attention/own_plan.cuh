// The plan of a call of few sequences: each thread block of the engines swap and wide makes what it
// needs of it, so that no other kernel has to come first. Here is what both find, the sequences and
// their roles; swap_plan.cuh and wide_plan.cuh have the rest.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_OWN_PLAN_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_OWN_PLAN_CUH_

#include "cuda/attention/plan_sequences.cuh"
#include "cuda/attention/problem.cuh"

namespace flashxla::attention {

// The warps that have sequences.
constexpr int kOwnPlanWarps = kMaxOwnSequences / 32;

// The sequences, as CheckTables takes them.
struct OwnList {
  struct Entry {
    int index, num_keys, role;
  };
  PlannedSequence* sequences;
  int size;

  __device__ Entry Get(int n) const { return {n, sequences[n].num_keys, sequences[n].role}; }
  __device__ void SetRole(int n, Role role) const { sequences[n].role = role; }
};

// Reads the sequences into shared memory: each thread has one, and returns it. The threads of the
// block must call it together; they are at least kMaxOwnSequences. Another __syncthreads() must
// come before others' sequences are read.
__device__ inline PlannedSequence ReadOwnSequences(const Problem& p, PlannedSequence* sequences) {
  const IndexTensors& index = p.index;
  const bool checks = !p.roles.all_few && index.block_table.data != nullptr;
  TableGlance glance(index.block_table, checks);
  const int i = threadIdx.x, num_sequences = NumSequences(index);
  PlannedSequence s = {};
  bool grows = true, has_keys = false;
  if (i < num_sequences) {
    const int begin = At(index.cu_seqlens_q, i), end = At(index.cu_seqlens_q, i + 1);
    has_keys = ReadKeys(index, i, &s);
    grows = AreQueries(index, begin, end);
    s.first_query = begin, s.num_queries = end - begin;
  }
  const bool fine = __syncthreads_and(grows && (!checks || glance.AllSound()));
  if (!fine && !__syncthreads_and(grows)) {
    if (i < 32) ReadUnsoundQueries(index, num_sequences, sequences);
    __syncthreads();
    if (i < num_sequences) s.num_queries = sequences[i].num_queries;
  }
  if (has_keys && s.num_queries > 0) {
    s.role = RoleOf(p.roles, p.group_size, s, SetKvTiles(p.window, &s));
  } else {
    s = {};
  }
  if (i < index.num_sequences) sequences[i] = s;
  if (checks && !fine) {
    const OwnList list = {sequences, index.num_sequences};
    __syncthreads();
    CheckTables(p.roles, index.block_table, list);
    __syncthreads();
    if (i < index.num_sequences) s.role = sequences[i].role;
  }
  return s;
}

// Adds the sums of earlier warps to `sum`, this warp's InclusiveSum of what its sequences have, and
// returns the sum of all. of_warps: shared memory, one of each warp. All threads must call it.
__device__ inline int SumOverSequences(int* sum, int32_t (&of_warps)[kOwnPlanWarps]) {
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 31 && warp < kOwnPlanWarps) of_warps[warp] = *sum;
  __syncthreads();
  int total = 0;
#pragma unroll
  for (int other = 0; other < kOwnPlanWarps; ++other) {
    if (other < warp) *sum += of_warps[other];
    total += of_warps[other];
  }
  return total;
}

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_OWN_PLAN_CUH_
