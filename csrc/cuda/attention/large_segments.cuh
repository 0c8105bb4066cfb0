// What the thread blocks of large and of large_split compute, piece by piece.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_LARGE_SEGMENTS_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_LARGE_SEGMENTS_CUH_

#include "cuda/attention/rest_tile.cuh"
#include "cuda/attention/split.cuh"

namespace flashxla::attention {

// A q tile's rows with those keys of [begin, end) that they see.
struct LargeSegment {
  QTile tile;
  int begin, end;
  float* partial;  // where the partial result belongs; null if it is the whole result
};

// large: calls body(segment) for whole q tiles: number `first` of all, and each `step`-th after
// it. rows: of a q tile. Where a kv tile of so many keys begins must not depend on the q tile: see
// batch_invariant. All lanes of a warp must call it.
template <int kKeys, typename Body>
__device__ void ForEachRestSegment(const Problem& p, int rows, int first, int step, Body&& body) {
  const int count = RestTile::Count(p);
#pragma unroll 1
  for (int item = first; item < count; item += step) {
    const RestTile tile(p, item, rows);
    body(LargeSegment{tile, tile.seen.begin / kKeys * kKeys, tile.seen.end, nullptr});
  }
}

// large_split: the same for the steps of thread block `block` of a KV head. Returns the q tile that
// begins there and continues in other blocks, if one does.
template <typename Body>
__device__ SplitTile ForEachSplitSegment(const Problem& p, const SplitWorkspace& workspace,
                                         int kv_head, int block, Body&& body) {
  const FewBlock steps = ReadTogether(&p.plan.few_blocks[block]);
  if (steps.begin >= steps.end) return {};
  Cursor at(p, p.plan.sequences, steps);
#pragma unroll 1
  while (true) {  // q tiles
    const int first = at.step, end = FromFirstLane(min(at.tile_end, steps.end));
    const int first_key = at.first_key();
    const bool whole = first == at.tile_start && end == at.tile_end;
    body(LargeSegment{{at.index, kv_head, at.sequence, at.first_row},
                      first_key,
                      first_key + (end - first) * kFewKvTileKeys,
                      whole ? nullptr : workspace.partial(kv_head, block, first != steps.begin)});
    if (end == steps.end) return at.Begun(block, first, steps.begin);
    at.step = end - 1;
    at.Next<true>(p);
  }
}

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_LARGE_SEGMENTS_CUH_
