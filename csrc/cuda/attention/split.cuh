// Split-KV: what split.cu hands to combine.cu, i.e. partial results and which of them belong
// together.
//
// The plan divides the list of all steps (FewBlock in plan.cuh) evenly among the thread blocks.
// Block b of every KV head has the same steps: the KV heads advance side by side, because their
// keys are neighbours in memory. If several blocks share the steps of a q tile, each stores a
// partial result.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_SPLIT_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_SPLIT_CUH_

#include "cuda/attention/problem.cuh"

namespace flashxla::attention {

// A partial result: floats [kFewQTileRows][kDims] that are not normalized yet, then the rows'
// row_max and row_sum.
template <int kDims>
struct Partial {
  static constexpr int kRowMax = kFewQTileRows * kDims;
  static constexpr int kRowSum = kRowMax + kFewQTileRows;
  static constexpr int kFloats = kRowSum + kFewQTileRows;
};

// A block stores at most two partial results: of the q tile at the front of its steps, and of the
// one at the back.
__host__ __device__ inline int64_t PartialSlot(int64_t kv_head, int block, int blocks, bool back) {
  return 2 * (kv_head * blocks + block) + back;
}

// The q tile that begins in a block and continues in the next ones, if there is one.
struct alignas(16) SplitTile {
  int32_t num_parts;  // 0: none
  int32_t back;       // whether its first part is the partial result at the block's back
  int32_t index;      // of the sequence
  int32_t first_query, num_queries;
  int32_t first_row;
  int32_t unused[2];
};

// The workspace: the partial results of all blocks, then a SplitTile for each block.
template <int kDims>
struct SplitWorkspace {
  float* partials;
  SplitTile* tiles;
  int blocks;  // per KV head

  __host__ __device__ SplitWorkspace(void* workspace, int num_kv_heads, int num_blocks)
      : partials(static_cast<float*>(workspace)),
        tiles(reinterpret_cast<SplitTile*>(
            partials + PartialSlot(num_kv_heads, 0, num_blocks, false) * Partial<kDims>::kFloats)),
        blocks(num_blocks) {}

  // Bytes of the workspace for `count` blocks in all.
  static constexpr int64_t Bytes(int64_t count) {
    return count * int64_t{2 * Partial<kDims>::kFloats * sizeof(float) + sizeof(SplitTile)};
  }

  __device__ float* partial(int kv_head, int block, bool back) const {
    return partials + PartialSlot(kv_head, block, blocks, back) * Partial<kDims>::kFloats;
  }
  __device__ SplitTile& tile(int kv_head, int block) const {
    return tiles[kv_head * blocks + block];
  }
};

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_SPLIT_CUH_
