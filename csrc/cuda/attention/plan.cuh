// The plan of an attention call: what its index tensors say, checked, and the engines' work lists.
// A buffer of 32-bit words on the device, written by plan.cu and read by every engine.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_PLAN_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_PLAN_CUH_

#include <cstdint>

namespace flashxla::attention {

// Who computes a sequence. The order is that of the lists below.
enum Engine : int32_t {
  kIdle = 0,   // it has no queries, sees no key, or its index entries are unsound
  kSplit = 1,  // few queries: tensor cores, the keys divided among all multiprocessors
  kTile = 2,   // any other: one block a tile of rows
  kWide = 3,   // many queries on Hopper: warpgroup matrix instructions, TMA loads
};

// Bits of the plan's attribute `engines`: which of them may be used.
enum EngineBits : int64_t {
  kUseSplit = 1 << kSplit,
  kUseWide = 1 << kWide,
  kSplitAll = 1 << 8,  // every sequence is kSplit, whatever its number of queries
};

constexpr int kSplitRows = 16;     // rows of a split tile; a row is a query token of one head
constexpr int kSplitKeys = 64;     // keys of one step
constexpr int kTileRows = 64;      // rows of a tile
constexpr int kWideQueries = 128;  // query tokens of a wide tile

// Sequences with more rows a KV head are not split. One query token of any group is: decoding is
// bound by the keys.
inline __host__ __device__ int64_t MaxSplitRows(int64_t group_size) {
  return group_size > 64 ? group_size : 64;
}

// A sequence whose index entries are sound; otherwise engine is kIdle.
struct alignas(16) Sequence {
  int32_t first_query;  // row of q
  int32_t num_queries;
  int32_t length;     // len_k, which aligns queries with keys
  int32_t first_key;  // keys [first_key, num_keys) can be seen
  int32_t num_keys;
  int32_t key_row;  // dense: row of k where the sequence starts
  int32_t engine;
  int32_t num_steps;   // split: groups of kSplitKeys keys, for each tile of rows
  int32_t first_step;  // split: the first group that any of its rows sees
  int32_t first_tile;  // wide: the first of its tiles in the list
  int32_t unused[2];
};

// Tokens that no engine looks after: outside every sequence, and in one that sees no key.
constexpr int kNoSequence = -1, kNoKeys = -2;

// A block of kSplit: its steps [begin, end) of the line, and the tile of rows that the first is of.
struct alignas(16) SplitBlock {
  int32_t begin, end;
  int32_t index;       // of the tile's sequence
  int32_t first_row;   // of the tile
  int32_t tile_start;  // its first step in the line
  int32_t unused[3];
  Sequence sequence;
};

// kSplit has at most this many blocks, all KV heads together: it bounds the workspace. (With more
// heads than that there is one block a head, and no partial result.) How many blocks a head has is
// part of the attribute `engines`, for the plan needs it and the device may be another's.
constexpr int kMaxSplitBlocks = 512;
constexpr int kSplitBlocksShift = 16;
inline __host__ __device__ int SplitBlocksOf(int64_t engines) {
  return static_cast<int>(engines >> kSplitBlocksShift);
}

// Where each part of a plan lies. Offsets in words; S sequences, T query tokens.
struct PlanLayout {
  int32_t num_sequences, num_tokens, num_wide;

  __host__ __device__ PlanLayout(int64_t sequences, int64_t tokens)
      : num_sequences(static_cast<int32_t>(sequences)),
        num_tokens(static_cast<int32_t>(tokens)),
        num_wide(static_cast<int32_t>(tokens / kWideQueries + sequences)) {}

  // Totals: word e is the length of engine e's list.
  static constexpr int64_t kTotals = 0, kTotalWords = 8;

  __host__ __device__ int64_t sequences() const { return kTotalWords; }
  // split: the blocks of each KV head [kMaxSplitBlocks]
  __host__ __device__ int64_t split_blocks() const {
    return sequences() + int64_t{sizeof(Sequence) / 4} * num_sequences;
  }
  // tile: tiles of the sequences before s [S + 1]
  __host__ __device__ int64_t tile_starts() const {
    return split_blocks() + int64_t{sizeof(SplitBlock) / 4} * kMaxSplitBlocks;
  }
  // The sequences of many queries, which several threads look after [S]
  __host__ __device__ int64_t long_list() const { return tile_starts() + num_sequences + 1; }
  // wide: (sequence, tile) of every tile, the most expensive first [num_wide]
  __host__ __device__ int64_t wide_tiles() const {
    return (long_list() + num_sequences + 1) / 2 * 2;
  }
  // The sequence of each query token, or one of the marks below [T]
  __host__ __device__ int64_t token_sequence() const { return wide_tiles() + 2ll * num_wide; }
  __host__ __device__ int64_t words() const { return token_sequence() + num_tokens; }
};

// A plan's parts by address.
struct PlanView {
  const int32_t* totals;
  const Sequence* sequences;
  const SplitBlock* split_blocks;
  const int32_t* tile_starts;
  const int2* wide_tiles;
  const int32_t* token_sequence;
  int32_t num_sequences;

  PlanView() = default;
  PlanView(const int32_t* plan, const PlanLayout& layout)
      : totals(plan + PlanLayout::kTotals),
        sequences(reinterpret_cast<const Sequence*>(plan + layout.sequences())),
        split_blocks(reinterpret_cast<const SplitBlock*>(plan + layout.split_blocks())),
        tile_starts(plan + layout.tile_starts()),
        wide_tiles(reinterpret_cast<const int2*>(plan + layout.wide_tiles())),
        token_sequence(plan + layout.token_sequence()),
        num_sequences(layout.num_sequences) {}
};

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_PLAN_CUH_
