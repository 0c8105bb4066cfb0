// How kSplit divides its steps among blocks: evenly, whatever the lengths.
//
// The steps of all (sequence, tile of rows) lie in one line, PlanView::split_starts. For each KV
// head block b takes steps [b * share, (b + 1) * share): the heads go along the line side by side,
// since they read neighbouring bytes. Where a tile's steps lie in several blocks, each leaves a
// partial result, and finish.cu merges them.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_SPLIT_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_SPLIT_CUH_

#include "cuda/attention/problem.cuh"

namespace flashxla::attention {

// Blocks of the launch are at most this many, whatever the GPU: it bounds the workspace. (With more
// KV heads than that there is one block a head, and no partial result.)
constexpr int kMaxSplitBlocks = 512;

__device__ inline int SplitShare(int total, int blocks) { return (total + blocks - 1) / blocks; }

// The tile of rows that a step belongs to.
struct SplitTile {
  int index;  // of the sequence
  int row_tile;
  int start;      // its first step in the line
  int num_steps;  // how many it has
  Sequence sequence;

  __device__ int first_row() const { return row_tile * kSplitRows; }

  // All lanes of a warp call it.
  __device__ void Find(const Problem& p, int x) {
    index = FindStart(p.plan.split_starts, p.plan.num_sequences, x);
    sequence = p.plan.sequences[index];
    const int rows = sequence.num_queries * p.group_size;
    const int row_tiles = (rows + kSplitRows - 1) / kSplitRows;
    const int base = p.plan.split_starts[index];
    num_steps = (p.plan.split_starts[index + 1] - base) / row_tiles;
    row_tile = (x - base) / num_steps;
    start = base + row_tile * num_steps;
  }
};

// Partial results of a block: its tile at the front (slot 0) and that at the back (slot 1).
// Each is [kSplitRows][head size rounded up to kDims] floats, then tops, then sums.
template <int kDims>
constexpr int kPartialFloats = kSplitRows * (kDims + 2);

// Where a block keeps one of them, in kPartialFloats.
__device__ inline int64_t PartialSlot(int kv_head, int block, int blocks, bool back) {
  return 2 * (int64_t{kv_head} * blocks + block) + back;
}

// The bucket of head sizes that an instance serves.
inline int DimsBucket(int64_t head_size) {
  return head_size <= 64 ? 64 : head_size <= 128 ? 128 : 256;
}

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_SPLIT_CUH_
