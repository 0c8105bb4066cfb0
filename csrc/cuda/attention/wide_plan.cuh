// The plan that wide makes itself (own_plan.cuh): the q tiles of a thread block.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_PLAN_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_PLAN_CUH_

#include "cuda/attention/own_plan.cuh"
#include "cuda/attention/scan.cuh"
#include "cuda/attention/wide_shared.cuh"

namespace flashxla::attention {

#if defined(FLASHXLA_HOPPER)

// What making the plan takes. It lies where queries, keys and values come to afterwards.
struct WideOwnPlan {
  PlannedSequence sequences[kMaxOwnSequences];
  int32_t ends[kMaxOwnSequences];  // the q tiles up to a sequence's last
  int32_t warp_tiles[kOwnPlanWarps];
  int32_t cost[kMaxOwnTiles], most_cost;  // kv tiles
  int32_t order[kMaxOwnTiles];            // the q tiles, the most expensive first
};

// Lists the thread block's q tiles: shared.own_tiles, and the first one in shared.tile(0). Returns
// how many all blocks have. All threads of the block must call it.
//
// Not inline: where it is, the compiler knows less of the addresses in shared memory, and the loops
// of the matrix instructions become longer.
template <typename S>
__device__ __noinline__ int MakeOwnPlan(const WideProblem& w, char* memory) {
  const WideShared<S> shared(memory);
  auto* own = reinterpret_cast<WideOwnPlan*>(memory + (shared.base - SharedAddress(memory)));
  const Problem& p = w.p;
  constexpr int kTokens = S::kQTileTokens;
  static_assert(sizeof(WideOwnPlan) <=
                S::kQueryStages * S::kQueryBytes + S::kStages * S::kKeyBytes);
  const int i = threadIdx.x;
  const PlannedSequence s = ReadOwnSequences(p, own->sequences);
  int end = InclusiveSum(ManyTiles(s.role, s.num_queries, kTokens));
  const int total = SumOverSequences(&end, own->warp_tiles);
  if (i < kMaxOwnSequences) own->ends[i] = end;
  if (i == 0) own->most_cost = 0;
  __syncthreads();
  auto tile_at = [&](int n) {
    // The first sequence with ends[] > n is in (low, high].
    int low = -1, high = kMaxOwnSequences - 1;
#pragma unroll 1
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (own->ends[middle] > n ? high : low) = middle;
    }
    // The last tile of a sequence comes first.
    return ManyTileOf(own->sequences[high], high, p.window, (own->ends[high] - 1 - n) * kTokens,
                      kTokens);
  };
  for (int n = i; n < total; n += S::kThreads) {
    const ManyTile tile = tile_at(n);
    own->cost[n] = KvTilesOf(tile, S::kKeys);
    if (S::kDivides) atomicMax(&own->most_cost, own->cost[n]);
  }
  __syncthreads();
  for (int n = i; n < total; n += S::kThreads) own->order[RankByCost(own->cost, total, n)] = n;
  __syncthreads();
  if (total == 0) return 0;
  int parts = 1;
  if constexpr (S::kDivides) {
    const int blocks = gridDim.x;
    const ManyShape shape = {kTokens, S::kKeys, p.num_heads, blocks, w.divides};
    parts = ChooseManyParts(shape, own->most_cost, total);
  }
  const int items = total * parts * p.num_heads;
  const int item = ItemOfRound(i, blockIdx.x, gridDim.x);
  if (item < items) {
    const int entry = item / p.num_heads, k = entry / parts, head = item % p.num_heads;
    const ManyTile tile = tile_at(own->order[k]);
    const OwnTile of_round = {static_cast<uint16_t>(tile.index),
                              static_cast<uint16_t>(head),
                              static_cast<uint16_t>(head / p.group_size),
                              static_cast<uint8_t>(entry % parts),
                              static_cast<uint8_t>(parts),
                              tile.first_query,
                              k};
    shared.own_tiles()[i] = of_round;
    if (i == 0) *shared.tile(0) = of_round.template Tile<S>(tile.s, p.window);
  }
  FenceProxy();  // TMA is to write to the same place
  __syncthreads();
  return items;
}

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_PLAN_CUH_
