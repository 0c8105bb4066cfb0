// What the engines for few queries have in common: how many steps and thread blocks there are, and
// the workspace.
#include <algorithm>

#include "cuda/attention/dispatch.cuh"
#include "cuda/attention/engines.h"
#include "cuda/attention/split.cuh"

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

int NumFewBlocks(const Problem& p) {
  const int per_multiprocessor =
      FewBlocksEach(UsualHeadSizes::Bucket(p.LargerHeadSize()), p.few_q_tile_rows);
  // Without a GPU, the most that any GPU gets: then the workspace is large enough for each.
  const int blocks =
      CurrentDevice() < 0 ? kMaxFewBlocks : NumMultiprocessors() * per_multiprocessor;
  return std::max(std::min(blocks, kMaxFewBlocks) / p.num_kv_heads, 1);
}

int NumLoneBlocks(const Problem& p) {
  const int each = FewBlocksEach(UsualHeadSizes::Bucket(p.LargerHeadSize()), p.few_q_tile_rows);
  return each > 1 ? NumMultiprocessors() / p.num_kv_heads : 0;
}

int64_t SplitWorkspaceBytes(const Problem& p) {
  constexpr int64_t kAlignment = 256;
  return (SplitWorkspace::Bytes(p) + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace flashxla::attention
