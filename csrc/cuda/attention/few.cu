// What the engines for few queries have in common: how many steps and thread blocks there are, and
// the workspace.
#include <algorithm>

#include "common/tensor_view.h"
#include "cuda/attention/dispatch.cuh"
#include "cuda/attention/engines.h"
#include "cuda/attention/split.cuh"
#include "cuda/attention/tensor_map.h"

namespace flashxla::attention {

bool AreFewStepsCountable(const Facts& facts, bool any_length) {
  const Problem& p = facts.problem;
  const double sequences = static_cast<double>(facts.num_sequences);
  const double rows = static_cast<double>(p.num_tokens) * p.group_size;
  double q_tiles = rows / kSplitQTileRows + sequences;
  if (!any_length) {
    const int64_t tiles_of_one = (MaxFewRows(p.group_size) + kSplitQTileRows - 1) / kSplitQTileRows;
    q_tiles = std::min(q_tiles, sequences * static_cast<double>(tiles_of_one));
  }
  const double steps = q_tiles * static_cast<double>(facts.capacity / kFewKvTileKeys + 2);
  // Thread blocks count beyond the last step, as FewShare may give each a sixteenth, or a few
  // steps, more than its share.
  return (steps + kMaxFewBlocks) * 17 / 16 < double{INT32_MAX};
}

namespace {

// Rows of swap's q tiles. Those of 32 are for two thread blocks on a multiprocessor.
int SwapQTileRows(int64_t most_rows, int head_size, bool copies) {
  if (most_rows <= kSplitQTileRows) return kSplitQTileRows;
  return most_rows <= kSwapMidRows && head_size <= 128 && !copies ? kSwapMidRows : kSwapQTileRows;
}

// How many keys of one KV head the block tables, or dense keys, have room for.
double KeysOfTables(const Facts& facts) {
  const int64_t tables = facts.problem.block_table.data != nullptr ? facts.num_sequences : 1;
  return static_cast<double>(tables) * static_cast<double>(facts.capacity);
}

// How many neighbouring KV heads a thread block of swap should have at a time. Keys come in lines
// of 128 bytes: a row of 192 takes as many requests as one of 256, and two such rows three; rows of
// 160 take two each, and two rows three. That is worth the longer steps where there is much to
// read.
int TogetherHeads(const Facts& facts, int64_t most_rows) {
  const Problem& p = facts.problem;
  const bool side_by_side = IsPairedHeadSize(p.k.head_size) && p.v.head_size == p.k.head_size &&
                            p.k.stride_head == p.k.head_size && p.v.stride_head == p.v.head_size &&
                            p.num_kv_heads % 2 == 0 && !IsFp8(p.kv_dtype);
  constexpr double kLeastKeys = 1 << 17;  // of all heads: 40 to 50 MB with their values
  const double keys = KeysOfTables(facts) * p.num_kv_heads;
  return side_by_side && 2 * most_rows <= kSplitQTileRows && keys >= kLeastKeys ? 2 : 1;
}

// Whether copies read the keys faster than TMA. They keep memory busier, but start later, half a
// microsecond where the call begins: so there has to be much to read, also of a sequence.
bool IsCopiedFaster(const Facts& facts) {
  const Problem& p = facts.problem;
  constexpr int64_t kLeastRowBytes = 256;
  constexpr int64_t kLeastKeys = 512;
  constexpr double kLeastBytes = 128e6;
  const int64_t size = ElementSize(p.kv_dtype);
  const double bytes = KeysOfTables(facts) * p.num_kv_heads *
                       static_cast<double>((p.k.head_size + p.v.head_size) * size);
  return std::min(p.k.head_size, p.v.head_size) * size >= kLeastRowBytes && p.kv_near &&
         facts.capacity >= kLeastKeys && bytes >= kLeastBytes;
}

// Whether a call has so many sequences that they may well be short. Each then waits for its keys,
// its queries and its sums, one after the other, and a third thread block hides that.
bool MayBeManyShort(const Facts& facts) {
  constexpr int64_t kLeast = 1 << 14;  // of all heads
  return facts.num_sequences > kMaxOwnSequences &&
         facts.num_sequences * facts.problem.num_kv_heads >= kLeast;
}

// Sets how many thread blocks there are.
void CountBlocks(int num_kv_heads, int blocks_each, FewShape* few) {
  // Without a GPU, the most that any GPU gets: then the workspace is large enough for each.
  const int multiprocessors = CurrentDevice() < 0 ? 0 : NumMultiprocessors();
  const int blocks = multiprocessors > 0 ? multiprocessors * blocks_each : kMaxFewBlocks;
  few->num_blocks = std::max(std::min(blocks, kMaxFewBlocks) / num_kv_heads, 1);
  few->num_lone_blocks = few->combines && blocks_each > 1 ? multiprocessors / num_kv_heads : 0;
}

// Whether few sequences may be divided among so many thread blocks that several warps should add up
// the parts of a row. Such warps start 2 us later. A warp that adds alone takes about half a
// microsecond for each batch of parts that it fetches, and longer with large heads.
bool MayHaveManyParts(const Problem& p, int num_blocks) {
  const int dims = PartialShape(p).dims, most_batches = dims > kMaxUsualHeadSize ? 4 : 10;
  return num_blocks / std::max(p.index.num_sequences, 1) >= most_batches * PartsAhead(dims);
}

int BucketOf(const Problem& p) { return UsualHeadSizes::Bucket(p.LargerHeadSize()); }

}  // namespace

bool MustCopyFew(const Problem& p) { return WhyNoCacheBoxes(p, 8)[0] != '\0'; }

FewShape SwapWork(const Facts& facts, int64_t most_rows) {
  const Problem& p = facts.problem;
  FewShape few = {};
  few.combines = true;
  few.copies = MustCopyFew(p) || HasLargeHeads(p);
  few.q_tile_rows = kSwapQTileRows;
  if (most_rows >= 0) {
    few.heads_together = few.copies ? 1 : TogetherHeads(facts, most_rows);
    few.q_tile_rows = SwapQTileRows(most_rows * few.heads_together, p.LargerHeadSize(), few.copies);
    const bool may_vary =
        few.q_tile_rows == kSplitQTileRows && few.heads_together == 1 && !few.copies;
    few.many_short = may_vary && BucketOf(p) <= 128 && !IsFp8(p.kv_dtype) && MayBeManyShort(facts);
    if (may_vary && !few.many_short) few.copies = IsCopiedFaster(facts);
  }
  CountBlocks(p.num_kv_heads / few.heads_together,
              few.many_short ? kManyShortBlocksEach : FewBlocksEach(BucketOf(p), few.q_tile_rows),
              &few);
  return few;
}

FewShape SplitWork(const Problem& p, int q_tile_rows) {
  FewShape few = {};
  few.q_tile_rows = q_tile_rows;
  // A cluster counts as one thread block.
  const int heads = p.num_kv_heads * (q_tile_rows == kClusterQTileRows ? kClusterSize : 1);
  CountBlocks(heads, FewBlocksEach(BucketOf(p), q_tile_rows), &few);
  few.many_parts = MayHaveManyParts(p, few.num_blocks);
  return few;
}

void SetFew(const FewShape& few, Problem* p) {
  p->few = few;
  p->num_kv_heads /= few.heads_together;
  p->group_size *= few.heads_together;
  p->by_group_size = FastDivide(p->group_size);
}

int64_t SplitWorkspaceBytes(const Problem& p) {
  constexpr int64_t kAlignment = 256;
  return (SplitWorkspace::Bytes(p) + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace flashxla::attention
