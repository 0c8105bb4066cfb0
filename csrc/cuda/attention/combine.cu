// The last kernel of a call whose engines do not do its work: combines the partial results of q
// tiles whose keys were split, and writes the rows that see no key.
#include "cuda/attention/combine.cuh"
#include "cuda/attention/dispatch.cuh"
#include "cuda/attention/engines.h"
#include "cuda/launch.h"

namespace flashxla::attention {
namespace {

constexpr int kWarps = 16;
constexpr int kThreads = 32 * kWarps;

// What the warps of a block tell each other where several share a row.
template <int kDims>
struct Shared {
  int32_t rows[kThreads];                            // of each q tile
  int32_t rows_of_warp[kWarps], most_parts[kWarps];  // of the q tiles that a warp read
  float values[kWarps][kDims], row_max[kWarps], row_sum[kWarps];
};

// The q tile that begins in a block of the split engine, if its keys were split.
struct CombinedTile {
  int kv_head, block;
  SplitTile tile;

  // Number i of all.
  __device__ CombinedTile(const Problem& p, const SplitWorkspace& workspace, int i)
      : kv_head(i % p.num_kv_heads),
        block(i / p.num_kv_heads),
        tile(workspace.tile(kv_head, block)) {}

  __device__ int NumRows(const Problem& p, const SplitWorkspace& workspace) const {
    return tile.num_parts == 0
               ? 0
               : min(tile.num_queries * p.group_size - tile.first_row, workspace.shape.rows);
  }
};

// Adds up the partial results of a row: parts first, first + step, ... A warp must call it. Reads
// past L1, where another block's results may be missing.
template <int kDims>
__device__ CombinedRow<kDims> SumOfParts(const SplitWorkspace& workspace, const CombinedTile& at,
                                         int row, int first, int step) {
  using Row = CombinedRow<kDims>;
  constexpr int kAhead = PartsAhead(kDims);
  Row combined;
  const int lane = threadIdx.x & 31, num_parts = (at.tile.num_parts - first + step - 1) / step;
  if (num_parts <= 0) return combined;
  auto part = [&](int i) {
    const int n = first + i * step;
    return workspace.partial(at.kv_head, at.block + n, n == 0 && at.tile.back);
  };
  typename Row::Values ahead[kAhead];
  auto fetch = [&](int from) {
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const float* values = part(min(from + n, num_parts - 1)) + row * kDims;
#pragma unroll
      for (int i = 0; i < Row::kVectors; ++i) {
        ahead[n].vectors[i] =
            __ldcg(reinterpret_cast<const typename Row::Vector*>(values + Row::Dim(i)));
      }
    }
  };
  fetch(0);
#pragma unroll 1
  for (int base = 0; base < num_parts; base += 32) {
    const int count = min(num_parts - base, 32);
    float part_max = -INFINITY, part_sum = 0.f;
    if (lane < count) {
      part_max = __ldcg(part(base + lane) + workspace.shape.row_max() + row);
      part_sum = __ldcg(part(base + lane) + workspace.shape.row_sum() + row);
    }
    const float factor = combined.AddSums(part_max, part_sum);
#pragma unroll 1
    for (int n0 = 0; n0 < count; n0 += kAhead) {
      typename Row::Values now[kAhead];
#pragma unroll
      for (int n = 0; n < kAhead; ++n) now[n] = ahead[n];
      if (base + n0 + kAhead < num_parts) fetch(base + n0 + kAhead);
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        combined.AddValues(now[n], __shfl_sync(kAllLanes, factor, n0 + n));
      }
    }
  }
  return combined;
}

// Each warp combines rows of its own.
template <int kDims>
__global__ void __launch_bounds__(kThreads)
    CombineKernel(const __grid_constant__ Problem p, const SplitWorkspace workspace) {
  TriggerNext();
  WaitForPrevious();
  const int warp = threadIdx.x / 32, num_tiles = workspace.blocks * p.num_kv_heads;
  // A block takes kWarps rows of a q tile at a time.
  const int slabs = (workspace.shape.rows + kWarps - 1) / kWarps;
  for (int i = blockIdx.x; i < num_tiles * slabs; i += gridDim.x) {
    const CombinedTile at(p, workspace, i % num_tiles);
    const int row = i / num_tiles * kWarps + warp;
    if (row >= at.NumRows(p, workspace)) continue;
    SumOfParts<kDims>(workspace, at, row, 0, 1).Store(p, at.kv_head, at.tile, row);
  }
  StoreIdleTokens(p, blockIdx.x * kWarps + warp, gridDim.x * kWarps);
}

// Puts what this warp has of a row where the others find it.
template <int kDims>
__device__ void Give(const CombinedRow<kDims>& row, Shared<kDims>& shared) {
  using Row = CombinedRow<kDims>;
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) shared.row_max[warp] = row.row_max, shared.row_sum[warp] = row.row_sum;
#pragma unroll
  for (int i = 0; i < Row::kVectors; ++i) {
    float* const to = &shared.values[warp][Row::Dim(i)];
    *reinterpret_cast<typename Row::Vector*>(to) =
        reinterpret_cast<const typename Row::Vector*>(row.out)[i];
  }
}

// Adds what the next `count` warps have of a row.
template <int kDims>
__device__ void AddOthers(const Shared<kDims>& shared, int count, CombinedRow<kDims>& row) {
  using Row = CombinedRow<kDims>;
  const int lane = threadIdx.x & 31, next = threadIdx.x / 32 + 1;
  const bool has = lane < count;
  const float factor = row.AddSums(has ? shared.row_max[next + lane] : -INFINITY,
                                   has ? shared.row_sum[next + lane] : 0.f);
#pragma unroll 1
  for (int n = 0; n < count; ++n) {
    typename Row::Values x;
#pragma unroll
    for (int i = 0; i < Row::kVectors; ++i) {
      const float* from = &shared.values[next + n][Row::Dim(i)];
      x.vectors[i] = *reinterpret_cast<const typename Row::Vector*>(from);
    }
    row.AddValues(x, __shfl_sync(kAllLanes, factor, n));
  }
}

// Where rows may have many parts: several warps of a block share a row.
template <int kDims>
__global__ void __launch_bounds__(kThreads)
    CombineManyKernel(const __grid_constant__ Problem p, const SplitWorkspace workspace) {
  static_assert(kThreads >= kMaxFewBlocks);  // a thread reads a q tile
  __shared__ alignas(16) Shared<kDims> shared;
  TriggerNext();
  WaitForPrevious();
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int num_tiles = workspace.blocks * p.num_kv_heads;
  int rows = 0, parts = 0;
  if (thread < num_tiles) {
    const CombinedTile at(p, workspace, thread);
    rows = at.NumRows(p, workspace), parts = at.tile.num_parts;
  }
  shared.rows[thread] = rows;
  const int rows_of_warp = __reduce_add_sync(kAllLanes, rows);
  const int parts_of_warp = __reduce_max_sync(kAllLanes, parts);
  if (lane == 0) shared.rows_of_warp[warp] = rows_of_warp, shared.most_parts[warp] = parts_of_warp;
  __syncthreads();
  // Of 32 q tiles each, up to those of the lane.
  const int end = InclusiveSum(lane < kWarps ? shared.rows_of_warp[lane] : 0);
  const int num_rows = __shfl_sync(kAllLanes, end, 31);
  const int most_parts = __reduce_max_sync(kAllLanes, lane < kWarps ? shared.most_parts[lane] : 0);
  int together = 1;  // warps that share a row
  while (together < kWarps && 2 * together * num_rows <= gridDim.x * kWarps &&
         2 * together * PartsAhead(kDims) <= most_parts) {
    together *= 2;
  }
  const int at_once = kWarps / together, number = warp % together;
#pragma unroll 1
  for (int first = blockIdx.x * at_once; first < num_rows; first += gridDim.x * at_once) {
    const int item = first + warp / together;
    const bool exists = item < num_rows;
    const int found = min(item, num_rows - 1);
    const int group = __ffs(__ballot_sync(kAllLanes, end > found)) - 1;
    const int of_lane = shared.rows[32 * group + lane];
    const int end_of_lane =
        __shfl_sync(kAllLanes, end, group) - shared.rows_of_warp[group] + InclusiveSum(of_lane);
    const int owner = __ffs(__ballot_sync(kAllLanes, end_of_lane > found)) - 1;
    const int row = found - __shfl_sync(kAllLanes, end_of_lane - of_lane, owner);
    const CombinedTile at(p, workspace, 32 * group + owner);
    CombinedRow<kDims> combined = SumOfParts<kDims>(workspace, at, row, number, together);
    if (together > 1) {
      if (number > 0) Give(combined, shared);
      __syncthreads();
      if (number == 0) AddOthers(shared, together - 1, combined);
      __syncthreads();
    }
    if (number == 0 && exists) combined.Store(p, at.kv_head, at.tile, row);
  }
  StoreIdleTokens(p, blockIdx.x * kWarps + warp, gridDim.x * kWarps);
}

}  // namespace

void LaunchCombine(const Problem& p, void* workspace, cudaStream_t stream) {
  const SplitWorkspace parts(p, workspace);
  CombinedHeadSizes::With(parts.shape.dims, [&](auto dims) {
    constexpr int kDims = decltype(dims)::value;
    LaunchDependent(p.few.many_parts ? CombineManyKernel<kDims> : CombineKernel<kDims>,
                    2 * NumMultiprocessors(), kThreads, 0, stream, p, parts);
  });
}

}  // namespace flashxla::attention
