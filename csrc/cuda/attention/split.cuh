// What kSplit leaves for finish.cu: partial results, and which of them belong together.
//
// The steps of all (sequence, tile of rows) lie in one line, which the plan divides evenly. For
// each KV head block b takes a run of steps: the heads go along the line side by side, since they
// read neighbouring bytes. Where a tile's steps lie in several blocks, each leaves a partial
// result.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_SPLIT_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_SPLIT_CUH_

#include "cuda/attention/problem.cuh"

namespace flashxla::attention {

// A partial result: [kSplitRows][kDims] floats, then tops, then sums.
template <int kDims>
constexpr int kPartialFloats = kSplitRows * (kDims + 2);

// A block has two places for them: of its tile at the front, and of that at the back.
__host__ __device__ inline int64_t PartialSlot(int64_t kv_head, int block, int blocks, bool back) {
  return 2 * (kv_head * blocks + block) + back;
}

// The tile that begins in a block and goes on in the next ones, if there is one.
struct alignas(16) SplitMerge {
  int32_t num_parts;  // 0: none
  int32_t back;       // whether its first part is the block's back one
  int32_t index;      // of the sequence
  int32_t first_query, num_queries;
  int32_t first_row;
  int32_t unused[2];
};

// The workspace: partial results of every block, then a SplitMerge of each.
template <int kDims>
struct SplitWorkspace {
  float* partials;
  SplitMerge* merges;
  int blocks;  // of each KV head

  __host__ __device__ SplitWorkspace(float* workspace, int num_kv_heads, int num_blocks)
      : partials(workspace),
        merges(reinterpret_cast<SplitMerge*>(
            workspace + PartialSlot(num_kv_heads, 0, num_blocks, false) * kPartialFloats<kDims>)),
        blocks(num_blocks) {}

  __device__ float* partial(int kv_head, int block, bool back) const {
    return partials + PartialSlot(kv_head, block, blocks, back) * kPartialFloats<kDims>;
  }
  __device__ SplitMerge& merge(int kv_head, int block) const {
    return merges[kv_head * blocks + block];
  }
};

// The bucket of head sizes that an instance serves.
inline int DimsBucket(int64_t head_size) {
  return head_size <= 64 ? 64 : head_size <= 128 ? 128 : 256;
}

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_SPLIT_CUH_
