// Where q tiles of many queries are too few for all multiprocessors, as those of a chunk after a
// long context are: their keys are divided into parts, which thread blocks share.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_MANY_PARTS_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_MANY_PARTS_CUH_

#include "cuda/attention/plan.cuh"
#include "cuda/attention/warp.cuh"

namespace flashxla::attention {

constexpr int kMinPartKvTiles = 4, kMinDividedKvTiles = 16;
constexpr int kMaxManyParts = 32;  // of a q tile

__device__ inline int DivideUp(int a, int b) { return (a + b - 1) / b; }

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

// How many parts q tiles are to have. kv_tiles: of the `count` q tiles, the most first; costs:
// shared memory. All threads of the block, which are whole warps, must call it.
__device__ inline int ChooseManyParts(const ManyShape& shape, const int32_t* kv_tiles, int count,
                                      int32_t (&costs)[kMaxManyParts]) {
  if (!shape.divides) return 1;
  const int q_tiles = count * shape.num_heads;
  if (q_tiles > kMaxPartials || kv_tiles[0] < kMinDividedKvTiles) return 1;
  const int most_parts = min(kMaxPartials / q_tiles + 1, kMaxManyParts);
  // A warp computes what the busiest thread block would have to do, in fifths of a kv tile.
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int parts = threadIdx.x / 32 + 1; parts <= most_parts; parts += blockDim.x / 32) {
    const int items = q_tiles * parts;
    unsigned most = 0;
#pragma unroll 1
    for (int block = lane; block < shape.num_blocks; block += 32) {
      unsigned load = 0;
#pragma unroll 1
      for (int round = 0; round * shape.num_blocks < items; ++round) {
        const int item = ItemOfRound(round, block, shape.num_blocks);
        if (item >= items) continue;
        const int entry = item / shape.num_heads, k = entry / parts;
        const int each = KvTilesOfPart(kv_tiles[k], parts);
        load += max(min(each, kv_tiles[k] - (entry - k * parts) * each), 0);
      }
      most = max(most, load);
    }
    most = __reduce_max_sync(kAllLanes, most);
    // To write partial results and to add them up takes time, too.
    if (lane == 0) costs[parts - 1] = 5 * most + (parts > 1 ? 10 + 2 * parts : 0);
  }
  __syncthreads();
  int best = 1;
  for (int parts = 2; parts <= most_parts; ++parts) {
    if (costs[parts - 1] < costs[best - 1]) best = parts;
  }
  return best;
}

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_MANY_PARTS_CUH_
