// Where q tiles of many queries are too few for all multiprocessors, as those of a chunk after a
// long context are: their keys are divided into parts, which thread blocks share.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_MANY_PARTS_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_MANY_PARTS_CUH_

#include "cuda/attention/fixed_parts.cuh"

namespace flashxla::attention {

constexpr int kMinPartKvTiles = 4, kMinDividedKvTiles = 16;
constexpr int kMaxManyParts = 32;  // of a q tile

// The kv tiles with keys that a q tile sees.
__device__ inline int KvTilesOf(const ManyTile& tile, int kv_tile_keys) {
  return tile.begin < tile.end ? DivideUp(tile.end, kv_tile_keys) - tile.begin / kv_tile_keys : 0;
}

// The kv tiles of a part, if a q tile is to have `parts`.
__device__ inline int KvTilesOfPart(int kv_tiles, int parts) {
  return max(DivideUp(kv_tiles, parts), parts > 1 ? kMinPartKvTiles : 1);
}

// Makes a q tile, the k-th of the list, its part `part` of `parts`. A q tile with few keys has
// fewer; then nothing is to be done for the others.
__device__ inline void TakePart(int kv_tile_keys, int k, int part, int parts, ManyTile* tile) {
  const int kv_tiles = KvTilesOf(*tile, kv_tile_keys), each = KvTilesOfPart(kv_tiles, parts);
  const int num_parts = max(DivideUp(kv_tiles, each), 1);
  tile->part = static_cast<uint8_t>(part), tile->num_parts = static_cast<uint8_t>(num_parts);
  tile->partial = static_cast<uint16_t>(k * (parts - 1) + part);
  if (part >= num_parts) {
    tile->begin = tile->end = tile->num_parts = 0;
  } else if (num_parts > 1) {
    const int first = tile->begin / kv_tile_keys + part * each;
    tile->begin = max(tile->begin, first * kv_tile_keys);
    tile->end = min(tile->end, (first + each) * kv_tile_keys);
  }
}

// Which of all heads' items a thread block takes in a round, where an item is a part of a q tile of
// a head. The list starts with the most expensive q tiles, and every other round goes over the
// blocks backwards, so that all blocks get similar shares.
__device__ inline int ItemOfRound(int round, int block, int blocks) {
  return round * blocks + (round % 2 ? blocks - 1 - block : block);
}

// How many parts the `count` q tiles of each head are to have. kv_tiles: of the one with the most.
//
// Only one round is divided, in which each thread block has a part at most: so blocks wait for
// blocks only that start before them, however few of them run at a time.
__device__ inline int ChooseManyParts(const ManyShape& shape, int kv_tiles, int count) {
  if (!shape.divides || kv_tiles < kMinDividedKvTiles) return 1;
  const bool fixed = shape.fixed_parts > 0;
  if (fixed && shape.num_heads * count * shape.fixed_parts > shape.fixed_partials) return 1;
  const int most =
      min(min(shape.num_blocks, kMaxPartials) / shape.num_heads / count, kMaxManyParts);
  const int fixed_size = FixedPart::Of(kv_tiles - 1, shape.kv_tile_keys).size;
  int best = 1, least = 0;
  for (int parts = 1; parts <= most; ++parts) {
    // In fifths of a kv tile. To write partial results and to add them up takes time, too.
    const int each =
        fixed ? KvTilesOfFixed(kv_tiles, parts, fixed_size) : KvTilesOfPart(kv_tiles, parts);
    const int cost = 5 * each + (parts > 1 ? 10 + 2 * parts : 0);
    if (parts == 1 || cost < least) best = parts, least = cost;
  }
  return best;
}

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_MANY_PARTS_CUH_
