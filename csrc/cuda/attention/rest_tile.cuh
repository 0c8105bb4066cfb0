// The q tiles of role kRest, as the tensor core engines of that role take them.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_REST_TILE_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_REST_TILE_CUH_

#include <algorithm>

#include "cuda/attention/problem.cuh"
#include "cuda/attention/warp.cuh"
#include "cuda/launch.h"

namespace flashxla::attention {

// Rows of a sequence that share a KV head, from `first_row` on.
struct QTile {
  int index, kv_head;
  PlannedSequence s;
  int first_row;

  __device__ int NumRows(const Problem& p) const { return s.num_queries * p.group_size; }
};

struct RestTile : QTile {
  KeyRange seen;  // by any of its rows

  static __device__ int Count(const Problem& p) { return p.plan.totals[kRest] * p.num_kv_heads; }

  // Item `item` of Count(p). rows: of a q tile, as the plan has them. All lanes of a warp must call
  // it.
  __device__ RestTile(const Problem& p, int item, int rows = kRestQTileRows) {
    // Backwards: the last q tiles of a sequence see the most keys and should start first.
    const int tile = p.plan.totals[kRest] - 1 - item / p.num_kv_heads;
    kv_head = item % p.num_kv_heads;
    index = FindStart(p.plan.rest_starts, p.plan.num_sequences, tile);
    s = p.plan.sequences[index];
    first_row = (tile - p.plan.rest_starts[index]) * rows;
    const int last_row = min(first_row + rows, NumRows(p)) - 1;
    seen = p.Visible(s, first_row / p.group_size, last_row / p.group_size);
  }
};

// The thread blocks of a kernel for RestTiles, of which a multiprocessor has `each` at a time.
inline int NumRestBlocks(const Problem& p, int each) {
  const int64_t rows = int64_t{p.num_tokens} * p.group_size;
  const int64_t items = (rows / kRestQTileRows + p.plan.num_sequences) * p.num_kv_heads;
  return static_cast<int>(std::clamp<int64_t>(items, 1, int64_t{NumMultiprocessors()} * each));
}

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_REST_TILE_CUH_
