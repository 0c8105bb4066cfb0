// Split-KV, as the engines for few queries share it: the walk through the steps of a thread block,
// and what combine.cu gets from them, i.e. partial results and which of them belong together.
//
// The plan divides the list of all steps (FewBlock in plan.cuh) among the thread blocks, which get
// as many, but for the last one. Block b of every KV head has the same steps: the KV heads advance
// side by side, because their keys are neighbours in memory. If several blocks share the steps of a
// q tile, each stores a partial result.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_SPLIT_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_SPLIT_CUH_

#include "common/tensor_view.h"
#include "cuda/attention/dispatch.cuh"
#include "cuda/attention/problem.cuh"
#include "cuda/attention/warp.cuh"

namespace flashxla::attention {

// How many thread blocks of an engine for few queries a multiprocessor has at a time.
constexpr int FewBlocksEach(int dims, int q_tile_rows) {
  return dims > 128 || q_tile_rows > 64 ? 1 : 2;
}

// The same of swap where there are many sequences, which may be short.
constexpr int kManyShortBlocksEach = 3;

// Of heads that swap may take two at a time.
constexpr bool IsPairedHeadSize(int dims) { return dims == 80 || dims == 96; }

// Parts of a row whose values a warp of combine.cu fetches together.
constexpr int PartsAhead(int dims) { return dims <= 128 ? 8 : 1024 / dims; }

// A partial result of a q tile: floats [rows][dims] that are not normalized yet, then the rows'
// row_max (in log2) and row_sum.
struct PartialShape {
  int32_t rows, dims;

  explicit PartialShape(const Problem& p)
      : rows(p.few.q_tile_rows), dims(IsFp8(p.kv_dtype) || p.few.copies ? 128 : 64) {
    if (p.LargerHeadSize() > dims) dims = CombinedHeadSizes::Bucket(p.LargerHeadSize());
  }
  __host__ __device__ int64_t row_max() const { return int64_t{rows} * dims; }
  __host__ __device__ int64_t row_sum() const { return row_max() + rows; }
  __host__ __device__ int64_t floats() const { return row_sum() + rows; }
};

// The q tile that begins in a block and continues in the next ones, if there is one.
struct alignas(16) SplitTile {
  int32_t num_parts;  // 0: none
  int32_t back;       // whether its first part is the partial result at the block's back
  int32_t index;      // of the sequence
  int32_t first_query, num_queries;
  int32_t first_row;
  int32_t unused[2];
};

// The workspace: the partial results of all blocks, then a SplitTile and two flags for each block.
// A block stores at most two partial results: of the q tile at the front of its steps, and of the
// one at the back.
struct SplitWorkspace {
  float* partials;
  SplitTile* tiles;
  uint64_t* flags;  // swap: says that a partial result is there
  PartialShape shape;
  int32_t blocks;  // per KV head

  SplitWorkspace(const Problem& p, void* workspace)
      : partials(static_cast<float*>(workspace)), shape(p), blocks(p.few.num_blocks) {
    tiles = reinterpret_cast<SplitTile*>(partials + 2 * p.num_kv_heads * blocks * shape.floats());
    flags = reinterpret_cast<uint64_t*>(tiles + p.num_kv_heads * blocks);
  }

  static int64_t Bytes(const Problem& p) {
    return int64_t{p.num_kv_heads} * p.few.num_blocks *
           (2 * PartialShape(p).floats() * int64_t{sizeof(float)} + int64_t{sizeof(SplitTile)} +
            2 * int64_t{sizeof(uint64_t)});
  }

  __device__ float* partial(int kv_head, int block, bool back) const {
    return partials + PlaceOf(kv_head, block, back) * shape.floats();
  }
  __device__ uint64_t* flag(int kv_head, int block, bool back) const {
    return flags + PlaceOf(kv_head, block, back);
  }
  __device__ SplitTile& tile(int kv_head, int block) const {
    return tiles[kv_head * blocks + block];
  }

 private:
  __device__ int64_t PlaceOf(int kv_head, int block, bool back) const {
    return 2 * (kv_head * blocks + block) + back;
  }
};

// Sequences in the plan, or those that a thread block has planned itself.
struct SequenceList {
  const int32_t* first;
  int words;  // of each

  __device__ SequenceList(const ListedSequence* all)  // NOLINT: they are a list
      : first(reinterpret_cast<const int32_t*>(all)), words(sizeof(ListedSequence) / 4) {}
  __device__ SequenceList(const PlannedSequence* all)  // NOLINT
      : first(reinterpret_cast<const int32_t*>(all)), words(sizeof(PlannedSequence) / 4) {}
  __device__ const PlannedSequence* at(int i) const {
    return reinterpret_cast<const PlannedSequence*>(first + i * words);
  }
};

// Walks through a thread block's steps: the current q tile and the first key of the step.
struct Cursor {
  int step, end;
  int tile_start, tile_end;  // steps of the current q tile
  int index, first_row;
  int share;  // steps of every block but the last one
  SequenceList sequences;
  int last_index;
  PlannedSequence sequence;
  Together<PlannedSequence> next;  // fetched ahead

  // All lanes of a warp must call it, and Next.
  __device__ Cursor(const Problem& p, const SequenceList& all, const FewBlock& block)
      : step(block.begin),
        end(block.end),
        tile_start(block.tile_start),
        tile_end(block.tile_start + block.sequence.num_kv_tiles),
        index(block.index),
        first_row(block.first_row),
        share(block.share),
        sequences(all),
        last_index(p.index.num_sequences - 1),
        sequence(block.sequence),
        next(all.at(min(index + 1, last_index))) {}

  // kVotes: tells the compiler that all lanes go the same way, so that it keeps what they have in
  // common once. It shortens large loops; swap is a bit slower with it.
  template <bool kVotes = false>
  __device__ void Next(const Problem& p) {
    if (++step != tile_end || step == end) return;
    first_row += p.few.q_tile_rows;
    const bool ends = first_row >= sequence.num_queries * p.group_size;
    if (kVotes ? __any_sync(kAllLanes, ends) : ends) {
      first_row = 0;
      do {
        sequence = next.Get();
        ++index;
        next = Together<PlannedSequence>(sequences.at(min(index + 1, last_index)));
      } while (sequence.role != kFew);
    }
    tile_start = tile_end;
    tile_end += sequence.num_kv_tiles;
  }
  __device__ int first_key() const {
    return (sequence.first_seen / kFewKvTileKeys + step - tile_start) * kFewKvTileKeys;
  }

  // The current q tile if it begins in block `block`, at step `segment`, and continues in others.
  __device__ SplitTile Begun(int block, int segment, int block_begin) const {
    const bool continues = segment == tile_start && tile_end > end;
    const int last_block = (tile_end - 1) / share;
    return Describe(continues ? last_block - block + 1 : 0, segment != block_begin);
  }
  // The current q tile if it ends in block `block` and begins in an earlier one.
  __device__ SplitTile Ended(int block) const {
    const int first_block = tile_start / share;
    const bool ends = tile_end <= end && first_block < block;
    return Describe(ends ? block - first_block + 1 : 0, tile_start != first_block * share);
  }

 private:
  __device__ SplitTile Describe(int num_parts, bool back) const {
    return {num_parts, back, index, sequence.first_query, sequence.num_queries, first_row, {}};
  }
};

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_SPLIT_CUH_
