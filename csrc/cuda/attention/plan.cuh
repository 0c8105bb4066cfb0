// The plan of an attention call: its checked sequences and the work lists of the engines. It is a
// buffer of 32-bit words on the device, which plan.cu and slots.cu write.
//
// Work is divided into q tiles (rows or query tokens of one sequence) and kv tiles (keys). A row is
// one query token of one query head; the rows of a KV head are those of the heads that share it.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_PLAN_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_PLAN_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "common/sequences.h"
#include "common/visibility.h"

namespace flashxla::attention {

// What kind of work a sequence is. Each role but kIdle has a work list for one engine.
enum Role : int32_t {
  kIdle = 0,  // no queries, no visible key, or unsound index entries
  kFew = 1,   // few queries: all multiprocessors share the keys (split-KV)
  kMany = 2,  // many queries: large q tiles
  kRest = 3,  // all others: one thread block per q tile. Where few_takes_rest, there are none
};
constexpr int kNumRoles = 4;

constexpr int kFewKvTileKeys = 64;
// At most: see FewShape. Swap has q tiles of all three sizes.
constexpr int kSplitQTileRows = 16, kSwapMidRows = 32, kSwapQTileRows = 128;
constexpr int kRestQTileRows = 64;
// Of a cluster of so many thread blocks, which share what they load: see large_cluster.cu.
constexpr int kClusterSize = 2, kClusterQTileRows = kClusterSize * kRestQTileRows;

// With fewer queries than this most of a q tile for many queries would be empty. Where it has all
// heads that share a KV head, the limit is that of few queries, MaxFewRows; but never less than
// this.
constexpr int kMinManyQueries = 48, kMinPackedQueries = 9;

// A sequence has few queries if it has at most this many rows per KV head. A single query token
// always counts as few, whatever the group size: reading the keys dominates then.
inline __host__ __device__ int64_t MaxFewRows(int64_t group_size) {
  return group_size > 64 ? group_size : 64;
}

// A sequence, and what the plan adds.
struct PlannedSequence : Sequence {
  int32_t role;
  int32_t num_kv_tiles;  // few: kv tiles of each of its q tiles
  int32_t first_seen;    // the first key that any row sees
};

// The same in the plan.
struct alignas(16) ListedSequence : PlannedSequence {
  int32_t first_tile;  // many: its first q tile among those of all sequences
  int32_t unused[2];
};

// A part of a q tile of the engine for many queries, usually the only one: see many_parts.cuh. The
// plan writes it; head and kv_head are the engine's.
struct ManyTile {
  int32_t index, head, kv_head;
  int32_t first_query;      // in the sequence
  int32_t begin, end;       // the part's keys, of those that any of its queries sees
  uint8_t part, num_parts;  // num_parts 0: there is nothing to do
  uint16_t partial;         // the place of the part's result, unless it is the last part
  Sequence s;
  int32_t whole_begin;  // of fixed parts: `begin` of the whole q tile
};

// A token's entry in token_sequence: its sequence s; kNoSequence outside every sequence; or
// KeylessMark(s) if the sequence sees no key.
constexpr int kNoSequence = -1;
inline __host__ __device__ int32_t KeylessMark(int32_t sequence) { return -2 - sequence; }
inline __host__ __device__ bool IsKeyless(int32_t mark) { return mark < kNoSequence; }
inline __host__ __device__ int32_t SequenceOfMark(int32_t mark) {
  return IsKeyless(mark) ? -2 - mark : mark;
}

// The work of a thread block of the engine for few queries. A step is one kv tile of one q tile;
// the list of all steps goes sequence by sequence, q tile by q tile, kv tile by kv tile. The block
// computes steps [begin, end).
struct alignas(16) FewBlock {
  int32_t begin, end;
  int32_t index;       // the first step's sequence
  int32_t first_row;   // of the first step's q tile
  int32_t tile_start;  // the first step of that q tile
  int32_t share;       // steps of every block but the last one
  int32_t unused[2];
  PlannedSequence sequence;
};

// How the work with few queries is divided.
struct FewShape {
  int32_t num_blocks;  // thread blocks of each KV head; 0: no engine for few queries
  // So many of these have a multiprocessor each; 0 where all do, or where they do not combine.
  int32_t num_lone_blocks;
  int32_t q_tile_rows;
  // Neighbouring KV heads that a thread block has at a time: see TogetherHeads. If there are two, a
  // problem's num_kv_heads counts pairs, and its group_size is that of a pair.
  int32_t heads_together = 1;
  bool many_short;  // there are many sequences, which may be short
  bool copies;      // threads copy the keys, not TMA
  bool combines;    // the thread blocks combine what they computed
  bool many_parts;  // else: a q tile may be in so many parts that warps share a row's
};

// What decides how the q tiles of many queries are listed.
struct ManyShape {
  int32_t q_tile_tokens;  // query tokens of a q tile
  int32_t kv_tile_keys;
  int32_t num_heads;   // that have q tiles: query heads, or KV heads if these are packed
  int32_t num_blocks;  // thread blocks
  int32_t min_queries = kMinManyQueries;  // that a sequence of the role must have
  bool divides;                           // the keys of q tiles may be divided: see many_parts.cuh
  bool packs;        // a q tile has the rows of a KV head, else those of a query head
  bool odd_heads;    // heads do not all begin and end at multiples of 16 bytes
  bool copies_keys;  // the engine has copies of the keys: see key_copies.h
  // If they are divided into fixed parts: how many those of a q tile can be, and of how many, of
  // all heads together, there is room for the results.
  int32_t fixed_parts = 0, fixed_partials = 0;

  // Whether q tiles have the rows of a KV head, and all of their keys.
  bool packs_whole() const { return packs && !divides; }
};

// The most partial results of q tiles of many queries, of all heads together: as many as the
// largest GPU with Hopper's code has multiprocessors.
constexpr int kMaxPartials = 144;

// The most thread blocks of all KV heads together, which bounds the workspace. (With more KV heads
// than this, each has one block, and there are no partial results.)
constexpr int kMaxFewBlocks = 512;

// Of so many sequences the Hopper engines can make the plan themselves: see own_plan.cuh. If some
// may have many queries: of so many q tiles of these, which take so many rounds of a thread block
// of wide.
constexpr int kMaxOwnSequences = 256, kMaxOwnTiles = 1024, kMaxOwnRounds = 64;
// Of so many a warp of wide does it alone, if there is one round.
constexpr int kMaxLoneSequences = 32;

// Where the parts of a plan lie: offsets in words. S sequences, T query tokens.
struct PlanLayout {
  int32_t num_sequences, num_tokens, num_many;
  bool has_slots;

  // q_tile_tokens: of many queries; 0: there are none.
  __host__ __device__ PlanLayout(int64_t sequences, int64_t tokens, int q_tile_tokens, bool slots)
      : num_sequences(static_cast<int32_t>(sequences)),
        num_tokens(static_cast<int32_t>(tokens)),
        num_many(0),
        has_slots(slots) {
    if (q_tile_tokens == 0) return;
    num_many = static_cast<int32_t>(MaxManyTiles(sequences, tokens, q_tile_tokens)) + kMaxPartials;
  }

  // The most q tiles of many queries.
  __host__ __device__ static int64_t MaxManyTiles(int64_t sequences, int64_t tokens,
                                                  int q_tile_tokens) {
    return (tokens + sequences * (q_tile_tokens - 1)) / q_tile_tokens;
  }

  // Word r is the length of role r's list; few: of the list of all steps.
  static constexpr int64_t kTotals = 0, kTotalWords = 8;

  __host__ __device__ int64_t sequences() const { return kTotalWords; }
  // few: the thread blocks, the same for each KV head [kMaxFewBlocks]
  __host__ __device__ int64_t few_blocks() const {
    return sequences() + int64_t{sizeof(ListedSequence) / 4} * num_sequences;
  }
  // rest: entry s counts the q tiles of the sequences before s [S + 1]
  __host__ __device__ int64_t rest_starts() const {
    return few_blocks() + int64_t{sizeof(FewBlock) / 4} * kMaxFewBlocks;
  }
  // The sequences that several threads of the plan kernel share [S]
  __host__ __device__ int64_t long_list() const { return rest_starts() + num_sequences + 1; }
  // many: the parts of q tiles, the most expensive q tiles first [num_many]
  __host__ __device__ int64_t many_tiles() const {
    return (long_list() + num_sequences + 3) / 4 * 4;
  }
  // The mark of each query token [T]
  __host__ __device__ int64_t token_sequence() const {
    return many_tiles() + int64_t{sizeof(ManyTile) / 4} * num_many;
  }
  // Optional: the slot of each query token's new key, -1 if it has none; int64 [T]
  __host__ __device__ int64_t slots() const { return (token_sequence() + num_tokens + 1) / 2 * 2; }
  __host__ __device__ int64_t words() const {
    return has_slots ? slots() + 2ll * num_tokens : token_sequence() + num_tokens;
  }
};

// The addresses of a plan's parts.
struct PlanView {
  const int32_t* totals;
  const ListedSequence* sequences;
  const FewBlock* few_blocks;
  const int32_t* rest_starts;
  const ManyTile* many_tiles;
  const int32_t* token_sequence;
  int32_t num_sequences;

  PlanView() = default;
  PlanView(const int32_t* plan, const PlanLayout& layout)
      : totals(plan + PlanLayout::kTotals),
        sequences(reinterpret_cast<const ListedSequence*>(plan + layout.sequences())),
        few_blocks(reinterpret_cast<const FewBlock*>(plan + layout.few_blocks())),
        rest_starts(plan + layout.rest_starts()),
        many_tiles(reinterpret_cast<const ManyTile*>(plan + layout.many_tiles())),
        token_sequence(plan + layout.token_sequence()),
        num_sequences(layout.num_sequences) {}
};

// What decides the role of a sequence, beside its lengths.
struct RoleRules {
  bool use_few;              // the role kFew has an engine of its own
  bool all_few;              // and every sequence has few queries
  bool few_chunks;           // it also takes chunks of queries that see many keys: see IsFewChunk
  bool few_takes_long;       // and chunks with so many keys that they are better divided
  bool few_takes_rest;       // and what would be kRest
  bool use_many;             // the role kMany has an engine of its own
  int32_t min_many_queries;  // of a sequence that it takes
};

// What a plan is made from.
struct PlanProblem {
  IndexTensors index;
  Window window;
  int32_t group_size;
  RoleRules roles;
  bool want_slots;
  FewShape few;
  ManyShape many;
  int32_t rest_q_tile_rows;
  int32_t* plan;

  __host__ __device__ PlanLayout layout() const {
    return PlanLayout(index.num_sequences, index.num_tokens, many.q_tile_tokens, want_slots);
  }
};

// Writes the plan, but for its slots.
void LaunchPlan(const PlanProblem& problem, cudaStream_t stream);
// Writes the plan's slots, after LaunchPlan.
void LaunchSlots(const PlanProblem& problem, cudaStream_t stream);

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_PLAN_CUH_
