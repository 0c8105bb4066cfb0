// Makes the plan: one thread block, after the one that makes attention's.
#include "cuda/attention/scan.cuh"
#include "cuda/attention_backward/plan.cuh"
#include "cuda/launch.h"

namespace flashxla::attention_backward {
namespace {

using attention::kAllLanes;
using attention::kMaxSorted;
using attention::kScanThreads;
using attention::kScanWarps;
using attention::ListedSequence;
using attention::PlannedSequence;

struct PlanProblem {
  attention::PlanProblem attention;
  PlanLayout layout;
  bool deterministic;
};

struct Shared {
  attention::ScanMemory scan;
  uint32_t cost_keys[kMaxSorted];
  int32_t ends[kScanWarps];
};

__device__ int Tiles(int n, int tile) { return (n + tile - 1) / tile; }

// The key tiles that some query of a sequence sees: [first, end).
__device__ int2 KeyTilesOf(const PlannedSequence& s, const Window& window, int key_tile) {
  if (s.role == attention::kIdle) return {0, 0};
  const KeyRange keys = VisibleKeys(s, window, 0, s.num_queries - 1);
  return {keys.begin / key_tile, Tiles(keys.end, key_tile)};
}

// How many queries see some key of a key tile.
__device__ int CostOf(const PlannedSequence& s, const Window& window, int key_tile, int tile) {
  const int64_t offset = int64_t{s.length} - s.num_queries;
  const int64_t first_key = int64_t{tile} * key_tile;
  const int64_t last_key = min(first_key + key_tile, int64_t{s.num_keys}) - 1;
  int64_t begin = 0, end = s.num_queries;
  if (window.right >= 0) begin = max(begin, first_key - window.right - offset);
  if (window.left >= 0) end = min(end, last_key + window.left - offset + 1);
  return static_cast<int>(max(end - begin, int64_t{0}));
}

// The largest `value` of the threads before this one, or `before` if that is larger. Sets *last to
// that of all threads.
__device__ int MaxBefore(int32_t* warps, int value, int before, int* last) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  int inclusive = value;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(kAllLanes, inclusive, step);
    if (lane >= step) inclusive = max(inclusive, other);
  }
  if (lane == 31) warps[warp] = inclusive;
  __syncthreads();
  int result = before, all = before;
  for (int i = 0; i < kScanWarps; ++i) {
    if (i < warp) result = max(result, warps[i]);
    all = max(all, warps[i]);
  }
  const int left = __shfl_up_sync(kAllLanes, inclusive, 1);
  if (lane > 0) result = max(result, left);
  __syncthreads();
  *last = all;
  return result;
}

// Lists tiles in the order of sorted keys.
__device__ void InOrder(const uint32_t* cost_keys, int2* tiles, int count) {
  constexpr int kEach = kMaxSorted / kScanThreads;
  int2 mine[kEach];
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    const int k = static_cast<int>(threadIdx.x) + n * kScanThreads;
    if (k < count) mine[n] = tiles[attention::TileOfKey(cost_keys[k])];
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    const int k = static_cast<int>(threadIdx.x) + n * kScanThreads;
    if (k < count) tiles[k] = mine[n];
  }
}

__global__ void __launch_bounds__(kScanThreads)
    PlanKernel(const __grid_constant__ PlanProblem problem) {
  __shared__ Shared shared;
  attention::Scan scan{shared.scan};
  const attention::PlanProblem& p = problem.attention;
  const PlanLayout& layout = problem.layout;
  const auto* sequences =
      reinterpret_cast<const ListedSequence*>(p.plan + layout.attention.sequences());
  const int32_t* token_sequence = p.plan + layout.attention.token_sequence();
  int32_t* row_tile_starts = p.plan + layout.row_tile_starts();
  auto* key_tiles = reinterpret_cast<int2*>(p.plan + layout.key_tiles());
  const int count = layout.attention.num_sequences;

  int num_row_tiles = 0, num_key_tiles = 0, end_row = 0, total;
  bool shares_keys = false;
#pragma unroll 1
  for (int i0 = 0; i0 < count; i0 += kScanThreads) {
    const int i = i0 + threadIdx.x;
    PlannedSequence s = {};
    if (i < count) s = sequences[i];
    // Unsound sequences have no tokens.
    const bool sound =
        s.num_queries > 0 && attention::SequenceOfMark(token_sequence[s.first_query]) == i;
    const int rows = sound ? Tiles(s.num_queries, kRowTile) : 0;
    const int rows_before = num_row_tiles + scan.Exclusive(rows, &total);
    num_row_tiles += total;
    if (i < count) row_tile_starts[i] = rows_before;

    const int2 range = KeyTilesOf(s, p.window, layout.key_tile);
    const int tiles = range.y - range.x;
    const bool has_keys = tiles > 0;
    const int ends_before =
        MaxBefore(shared.ends, has_keys ? s.key_row + s.num_keys : 0, end_row, &end_row);
    // Where the keys of all sequences lie one after the other, the tiles fit in their list.
    shares_keys |= __syncthreads_or(has_keys && s.key_row < ends_before);
    if (shares_keys) continue;
    const int keys_before = num_key_tiles + scan.Exclusive(tiles, &total);
    num_key_tiles += total;
    for (int t = 0; t < tiles; ++t) {
      const int place = keys_before + t;
      key_tiles[place] = {i, range.x + t};
      if (place < kMaxSorted) {
        const int cost =
            problem.deterministic ? tiles - t : CostOf(s, p.window, layout.key_tile, range.x + t);
        shared.cost_keys[place] = attention::CostKey(cost, place);
      }
    }
  }
  if (!shares_keys && num_key_tiles <= kMaxSorted) {
    attention::SortKeys(shared.cost_keys, num_key_tiles);
    InOrder(shared.cost_keys, key_tiles, num_key_tiles);
  }
  if (threadIdx.x == 0) {
    row_tile_starts[count] = num_row_tiles;
    int32_t* totals = p.plan + layout.totals();
    totals[PlanLayout::kSharesKeys] = shares_keys;
    totals[PlanLayout::kKeyTiles] = shares_keys ? 0 : num_key_tiles;
    totals[PlanLayout::kNextItem] = 0;
  }
}

}  // namespace

void LaunchPlan(const IndexTensors& index, Window window, int32_t group_size, bool deterministic,
                const PlanLayout& layout, int32_t* words, cudaStream_t stream) {
  attention::PlanProblem p = {};
  p.index = index, p.window = window, p.group_size = group_size, p.plan = words;
  attention::LaunchPlan(p, stream);  // every sequence has the role kRest or kIdle
  PlanKernel<<<1, kScanThreads, 0, stream>>>({p, layout, deterministic});
}

}  // namespace flashxla::attention_backward
