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
  // A function that is not inline would read each field of the kernel's from memory.
  WideProblem problem;
  PlannedSequence sequences[kMaxOwnSequences];
  int32_t ends[kMaxOwnSequences];  // the q tiles up to a sequence's last
  int32_t warp_tiles[kMaxOwnSequences / 32];
  struct Tile {
    int32_t index, first_query;
    KeyRange keys;
  } tiles[kMaxOwnTiles];
  static_assert(kMaxOwnTiles <= kMaxSorted);
  alignas(16) uint32_t cost_keys[kMaxOwnTiles];
  int32_t most_cost;            // kv tiles
  int32_t num_served;           // query tokens
  int32_t order[kMaxOwnTiles];  // the q tiles, the most expensive first
};

template <typename S>
__device__ WideOwnPlan* OwnPlanOf(const WideShared<S>& shared, char* memory) {
  static_assert(sizeof(WideOwnPlan) <=
                S::kQueryStages * S::kQueryBytes + S::kStages * S::kKeyBytes);
  return reinterpret_cast<WideOwnPlan*>(memory + (shared.base - SharedAddress(memory)));
}

// Copies what MakeOwnPlan reads of the call. All threads of the block must call it, and
// __syncthreads() must come before MakeOwnPlan.
template <typename S>
__device__ void PrepareOwnPlan(const WideProblem& w, const WideShared<S>& shared, char* memory) {
  constexpr int kWords = sizeof(WideProblem) / 4;
  static_assert(sizeof(WideProblem) % 4 == 0 && kWords <= S::kThreads);
  auto* to = reinterpret_cast<int32_t*>(&OwnPlanOf(shared, memory)->problem);
  const auto* from = reinterpret_cast<const int32_t*>(&w);
  // Hides that these are the kernel's arguments, whose cache gives threads a word after another.
  asm volatile("" : "+l"(from));
  if (threadIdx.x < kWords) to[threadIdx.x] = from[threadIdx.x];
  if (threadIdx.x == 0) OwnPlanOf(shared, memory)->num_served = 0;
}

// Writes the thread block's q tile to shared.tile(0); its index is -1 if there is none. The leader
// must call it.
template <typename S>
__device__ void FindLoneTile(const WideShared<S>& shared, const WideProblem& w,
                             const PlannedSequence* sequences) {
  const Problem& p = w.p;
  const int lane = threadIdx.x & 31, tokens = TileRows<S>{w}.tokens();
  const PlannedSequence s = lane < p.index.num_sequences ? sequences[lane] : PlannedSequence{};
  const int end = InclusiveSum(ManyTiles(s.role, s.num_queries, tokens));
  const int entry = w.num_heads.Quotient(blockIdx.x);
  const unsigned after = __ballot_sync(kAllLanes, end > entry);
  const int owner = max(__ffs(after) - 1, 0);
  ManyTile tile = {};
  tile.index = -1;
  if (after != 0 && lane == owner) {
    // The last tile of a sequence comes first, as in a plan.
    tile = ManyTileOf(s, lane, p.window, (end - 1 - entry) * tokens, tokens);
    tile.head = (blockIdx.x - entry * w.work.num_heads) * TileRows<S>{w}.heads();
    tile.kv_head = p.by_group_size.Quotient(tile.head);
  }
  if (lane == owner) *shared.tile(0) = tile;
  if (blockIdx.x == 0 && p.few_left != nullptr) {
    const int served = __reduce_add_sync(kAllLanes, s.role == kMany ? s.num_queries : 0);
    if (lane == 0) *p.few_left = served < p.num_tokens, __threadfence();
  }
  FenceProxy();  // TMA is to write to where the sequences are
  __syncwarp();
}

// Lists the thread block's q tiles: shared.own_tiles, and the first one in shared.tile(0). Returns
// how many all blocks have, at most. All threads of the block must call it.
//
// Not inline: where it is, the compiler knows less of the addresses in shared memory, and the loops
// of the matrix instructions become longer.
template <typename S>
__device__ __noinline__ int MakeOwnPlan(char* memory) {
  const WideShared<S> shared(memory);
  WideOwnPlan* own = OwnPlanOf(shared, memory);
  const WideProblem& w = own->problem;
  const Problem& p = w.p;
  const int tokens = TileRows<S>{w}.tokens();
  const int i = threadIdx.x;
  const bool lone = w.has_lone_tiles, leads = i / 32 == shared.Leader(w.gathers);
  const OwnCall call = {p.index, p.roles, p.window, p.group_size};
  ReadOwnSequences(call, own->sequences, [](int, const PlannedSequence&) {});
  if (lone) {  // TMA soon writes to where the plan is: only this warp reads it from here on
    if (leads) FindLoneTile(shared, w, own->sequences);
    return static_cast<int>(gridDim.x);
  }
  const PlannedSequence s = i < p.index.num_sequences ? own->sequences[i] : PlannedSequence{};
  if (blockIdx.x == 0) {
    const unsigned served = __reduce_add_sync(kAllLanes, s.role == kMany ? s.num_queries : 0);
    if (i % 32 == 0) atomicAdd(&own->num_served, served);
  }
  int end = InclusiveSum(ManyTiles(s.role, s.num_queries, tokens));
  if (i % 32 == 31 && i < kMaxOwnSequences) own->warp_tiles[i / 32] = end;
  __syncthreads();
  int total = 0;
#pragma unroll
  for (int warp = 0; warp < kMaxOwnSequences / 32; ++warp) {
    if (warp < i / 32) end += own->warp_tiles[warp];
    total += own->warp_tiles[warp];
  }
  if (i < kMaxOwnSequences) own->ends[i] = end;
  if (i == 0) own->most_cost = 0;
  __syncthreads();
  // By a thread that has nothing else to do when the plan is made.
  const bool says = blockIdx.x == 0 && i == kWarpgroupThreads - 1 && p.few_left != nullptr;
  int32_t* few_left = p.few_left;
  const int left = own->num_served < p.num_tokens;
  auto say = [&] {
    if (says) *few_left = left, __threadfence();
  };
  if (total == 0) {
    say();
    return 0;
  }
#pragma unroll 1
  for (int n = i; n < (total + 3) / 4 * 4; n += S::kThreads) {
    own->cost_keys[n] = 0;
    if (n >= total) continue;
    // The first sequence with ends[] > n is in (low, high].
    int low = -1, high = p.index.num_sequences - 1;
#pragma unroll 1
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (own->ends[middle] > n ? high : low) = middle;
    }
    // The last tile of a sequence comes first.
    const ManyTile tile = ManyTileOf(own->sequences[high], high, p.window,
                                     (own->ends[high] - 1 - n) * tokens, tokens);
    const int cost = KvTilesOf(tile, S::kKeys);
    own->tiles[n] = {high, tile.first_query, {tile.begin, tile.end}};
    own->cost_keys[n] = CostKey(cost, n);
    if (S::kDivides) atomicMax(&own->most_cost, cost);
  }
  __syncthreads();
  if (total <= S::kThreads) {  // sooner done than to sort
    if (i < total) own->order[RankByKey(own->cost_keys, total, own->cost_keys[i])] = i;
  } else {
    SortKeys(own->cost_keys, total);
#pragma unroll 1
    for (int n = i; n < total; n += S::kThreads) own->order[n] = TileOfKey(own->cost_keys[n]);
  }
  __syncthreads();
  int parts = 1;
  if constexpr (S::kDivides) {
    parts = ChooseManyParts(w.work, own->most_cost, total);
  }
  const int items = total * parts * w.work.num_heads;
  const int item = ItemOfRound(i, blockIdx.x, gridDim.x);
  if (item < items) {
    const int entry = w.num_heads.Quotient(item), k = entry / parts, part = entry - k * parts;
    const int head = (item - entry * w.work.num_heads) * TileRows<S>{w}.heads();
    const int kv_head = p.by_group_size.Quotient(head);
    const WideOwnPlan::Tile found = own->tiles[own->order[k]];
    shared.own_tiles()[i] = {static_cast<uint16_t>(found.index),
                             static_cast<uint16_t>(head),
                             static_cast<uint16_t>(kv_head),
                             static_cast<uint8_t>(part),
                             static_cast<uint8_t>(parts),
                             found.first_query,
                             k};
    if (i == 0) {
      ManyTile tile = {
          found.index, head, kv_head, found.first_query,          found.keys.begin, found.keys.end,
          0,           1,    0,       own->sequences[found.index]};
      if (S::kDivides && parts > 1) TakePart(S::kKeys, k, part, parts, &tile);
      *shared.tile(0) = tile;
    }
  }
  FenceProxy();  // TMA is to write to the same place
  __syncthreads();
  say();
  return items;
}

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_PLAN_CUH_
