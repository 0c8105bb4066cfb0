// The loading warps of large_cluster.cu: TMA fills the units.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_LARGE_CLUSTER_LOAD_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_LARGE_CLUSTER_LOAD_CUH_

#include "cuda/attention/large_cluster_shared.cuh"

namespace flashxla::attention {

#if defined(FLASHXLA_HOPPER)

// Each thread block loads one block of each unit, for both. kValueBlocks: of each consumer
// warpgroup.
template <int kValueBlocks>
class ClusterLoader {
 public:
  __device__ ClusterLoader(const ClusterProblem& problem, ClusterShared& shared_memory)
      : w(problem),
        p(problem.p),
        shared(shared_memory),
        boxes_of_half(kClusterHalfKeys / problem.box_keys),
        half(Lane() / boxes_of_half),
        offset((Lane() - half * boxes_of_half) * problem.box_keys * kLargeRowBytes),
        warp(static_cast<int>(threadIdx.x - kClusterConsumers) / 32) {}

  // Loads the keys of a segment, kv tile by kv tile: the keys of one come before the values of the
  // one before.
  __device__ void Load(const LargeSegment& segment) {
    const QTile& tile = segment.tile;
    const int begin = segment.begin, end = segment.end;
    Place ahead = Find(tile, begin, end), now = {};  // early, to hide the table's latency
#pragma unroll 1
    for (int key = begin; key < end + kClusterKeys; key += kClusterKeys) {
      const Place last = now;
      if (key < end) {
        now = Resolve(ahead);
        ahead = Find(tile, key + kClusterKeys, end);
        LoadKeys(tile, key, now);
      }
      if (key > begin) LoadValues(tile, last);
    }
  }

 private:
  // Where the lane's box of a kv tile lies.
  struct Place {
    int block, token;
    bool there;
  };

  __device__ static int Lane() { return static_cast<int>(threadIdx.x & 31); }

  __device__ Place Find(const QTile& tile, int first, int end) const {
    const int key = first + Lane() * w.box_keys;
    Place place = {0, tile.s.key_row + key, half < 2 && key < min(end, tile.s.num_keys)};
    if (p.block_table.data != nullptr) {
      const int page = p.PageOf(key);
      place.token = key - page * p.block_table.block_size;
      if (place.there) place.block = Entry(p.block_table, tile.index, page);
    }
    return place;
  }
  // A box that is not there lies outside the cache from now on, and so becomes zeros.
  __device__ Place Resolve(Place place) const {
    place.there = place.there && IsSound(p.block_table, place.block);
    if (!place.there) place.block = p.block_table.num_blocks, place.token = 0;
    return place;
  }

  // Whether the next unit is this warp's: to start a copy takes time, so the warps take turns.
  __device__ bool IsMine() const {
    static_assert(ClusterShared::kUnits % kClusterLoaders == 0);
    return state.stage % kClusterLoaders == warp;
  }

  // Starts to load this thread block's block of the next unit, from column `column` on. of_tile:
  // the half of the kv tile that it has keys of.
  __device__ void LoadUnit(const CUtensorMap& map, const QTile& tile, const Place& place,
                           int of_tile, int column) {
    if (IsMine()) {
      const uint32_t full = SharedAddress(&shared.full[state.stage]);
      WaitBarrier(SharedAddress(&shared.empty[state.stage]), state.parity ^ 1);
      if (Lane() == 0) ArriveExpecting(full, 2 * kClusterBlockBytes);
      __syncwarp();
      if (half == of_tile) {
        LoadBox4Of((1 << kClusterSize) - 1, SharedAddress(shared.units[state.stage][rank]) + offset,
                   &map, full, column, tile.kv_head, place.token, place.block);
      }
    }
    state.Next();
  }

  __device__ void LoadKeys(const QTile& tile, int first, const Place& place) {
    if (IsMine()) NoteKeys(tile, first, place);
    kv_tile = (kv_tile + 1) % ClusterShared::kMasks;
    const int blocks = LargeBlocks(p.k.head_size);
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      LoadUnit(w.k, tile, place, rank, block * kLargeBlockColumns);
    }
  }
  __device__ void LoadValues(const QTile& tile, const Place& place) {
#pragma unroll 1
    for (int of_tile = 0; of_tile < 2; ++of_tile) {
#pragma unroll 1
      for (int block = 0; block < kValueBlocks; ++block) {
        LoadUnit(w.v, tile, place, of_tile, (rank * kValueBlocks + block) * kLargeBlockColumns);
      }
    }
  }

  // Says which keys of a kv tile exist.
  __device__ void NoteKeys(const QTile& tile, int first, const Place& place) {
    const unsigned there = __ballot_sync(kAllLanes, place.there);
    if (Lane() < 2) {
      const int key = first + Lane() * kClusterHalfKeys;
      const int low = min(max(tile.s.first_key - key, 0), kClusterHalfKeys);
      const int high = min(tile.s.num_keys - key, kClusterHalfKeys);
      const uint64_t inside =
          low < high ? ~uint64_t{0} >> (kClusterHalfKeys - (high - low)) << low : 0;
      uint64_t loaded = 0;
      for (int box = 0; box < boxes_of_half; ++box) {
        if ((there >> (Lane() * boxes_of_half + box)) & 1) {
          loaded |= ~uint64_t{0} >> (64 - w.box_keys) << box * w.box_keys;
        }
      }
      shared.exist[kv_tile][Lane()] = loaded & inside;
      shared.stale[kv_tile][Lane()] = loaded & ~inside;
    }
    __syncwarp();
  }

  const ClusterProblem& w;
  const Problem& p;
  ClusterShared& shared;
  const int boxes_of_half;
  const int half, offset;  // the lane's box: its half of the kv tile, and its place in a block
  const int warp, rank = ClusterRank();
  PipelineState<ClusterShared::kUnits> state;
  int kv_tile = 0;  // the next one's masks
};

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_LARGE_CLUSTER_LOAD_CUH_
