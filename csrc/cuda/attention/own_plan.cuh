// The plan of a call of few sequences: each thread block of the engines swap and wide makes what it
// needs of it, so that no other kernel has to come first. Here is what both find, the sequences and
// their roles; swap_plan.cuh and wide_plan.cuh have the rest.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_OWN_PLAN_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_OWN_PLAN_CUH_

#include "cuda/attention/plan_sequences.cuh"
#include "cuda/attention/problem.cuh"

namespace flashxla::attention {

// The sequences, as CheckTables takes them.
struct OwnList {
  struct Entry {
    int index, first_seen, num_keys, role;
  };
  PlannedSequence* sequences;
  int size;

  __device__ Entry Get(int n) const {
    const PlannedSequence& s = sequences[n];
    return {n, s.first_seen, s.num_keys, s.role};
  }
  __device__ void SetRole(int n, Role role) const { sequences[n].role = role; }
};

// What of a Problem decides about the sequences, in registers. Where the problem lies in shared
// memory, to read one number after another, each when it is needed, takes longer.
struct OwnCall {
  IndexTensors index;
  RoleRules roles;
  Window window;
  int32_t group_size;
};

// Reads the sequences into shared memory. Call: a Problem or an OwnCall. The threads of the block
// must call it together, and may read all sequences afterwards. A warp reads 32 at a time, and then
// calls note(g, s): lane l has s, number 32 g + l. Returns whether the sequences are still what
// note got.
template <typename Call, typename Note>
__device__ bool ReadOwnSequences(const Call& call, PlannedSequence* sequences, Note&& note) {
  const IndexTensors& index = call.index;
  const bool checks = !call.roles.all_few && index.block_table.data != nullptr;
  TableGlance glance(index.block_table, checks);
  const int threads = static_cast<int>(blockDim.x), num_sequences = NumSequences(index);
  const int lane = threadIdx.x & 31;
  bool grows = true;
#pragma unroll 1
  for (int i = threadIdx.x; i - lane < index.num_sequences; i += threads) {
    PlannedSequence s = {};
    if (i < num_sequences) {
      const int begin = At(index.cu_seqlens_q, i), end = At(index.cu_seqlens_q, i + 1);
      const bool has_keys = ReadKeys(index, i, &s);
      grows = grows && AreQueries(index, begin, end);
      s.first_query = begin, s.num_queries = end - begin;
      if (has_keys && s.num_queries > 0) {
        s.role = RoleOf(call.roles, call.group_size, s, SetSeen(call.window, &s));
      } else {
        s = {};
      }
    }
    if (i < index.num_sequences) sequences[i] = s;
    note(i / 32, s);
  }
  const bool fine = grows && (!checks || glance.AllSound());
  if (__syncthreads_and(fine)) return true;
  if (!__syncthreads_and(grows)) {
    if (threadIdx.x < 32) ReadUnsoundQueries(index, num_sequences, sequences);
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < num_sequences; i += threads) {
      if (sequences[i].role == kIdle || sequences[i].num_queries == 0) sequences[i] = {};
    }
  }
  if (checks) {
    __syncthreads();
    CheckTables(call.roles, index.block_table, OwnList{sequences, index.num_sequences});
  }
  __syncthreads();
  return false;
}

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_OWN_PLAN_CUH_
