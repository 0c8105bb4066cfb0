// How swap's blocks combine q tiles of more than a few rows.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_COMBINE_MANY_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_COMBINE_MANY_CUH_

#include "cuda/attention/swap_combine.cuh"

namespace flashxla::attention {

// A q tile with more rows is combined by CombineManyRows.
constexpr int kMostRowsAtOnce = 8;

#if defined(FLASHXLA_HOPPER)

// As CombineParts (swap_combine.cuh), which is quicker for the few rows of most decode calls. First
// the threads find out what each part of a row is multiplied by, some threads a row; then a warp
// adds up four rows at a time.
template <typename S>
__device__ void CombineManyRows(const SwapProblem& w, const SwapShared<S>& shared,
                                const SplitWorkspace& workspace, int kv_head, int warp,
                                const SplitTile& tile) {
  using Out = typename S::Out;
  constexpr int kMostBlocks = 144 * S::kThreadBlocks;     // that a Hopper GPU runs at a time
  constexpr int kVectors = S::kValueDims / 64;            // of a lane, of two dims
  constexpr int kRows = S::kStreams ? 2 : 4, kParts = 4;  // that a warp has at a time
  static_assert(S::kMaxRows <= S::kConsumerThreads);
  static_assert(S::kMaxRows * (kMostBlocks + kParts) * int{sizeof(float)} <=
                S::kStages * S::kStageBytes);
  const int num_parts = tile.num_parts;
  if (num_parts == 0) return;
  const Problem& p = w.p;
  const PartialShape& shape = workspace.shape;
  const int first_block = static_cast<int>(blockIdx.y) - num_parts + 1;
  const int rows = min(tile.num_queries * p.group_size - tile.first_row, shape.rows);
  AwaitParts<S>(w, workspace, kv_head, tile, first_block);

  // Each block has two places for partial results, and only the first part can be in the second.
  const float* const front = workspace.partial(kv_head, first_block, false);
  const int place = static_cast<int>(shape.floats());
  auto part = [&](int n) { return front + (n > 0 ? 2 * n : tile.back ? 1 : 0) * place; };
  auto place_of = [&](int row) {
    return p.PlaceOf(tile.first_query, kv_head, tile.first_row + row);
  };

  // What the parts of rows are multiplied by: [rows, stride], 0 where there is no part.
  auto* const factors = reinterpret_cast<float*>(shared.stage_data(0));
  const int stride = (num_parts + kParts - 1) / kParts * kParts;
  int lanes = 32;  // of a row
  while (rows * lanes > S::kConsumerThreads) lanes /= 2;
  const int own = threadIdx.x / lanes, first_of_lane = threadIdx.x % lanes;
  const int end = own < rows ? num_parts : 0;
  float* const factor = factors + own * stride;
  float row_max = -INFINITY, row_sum = 0.f;
  auto add = [&](float other_max, float other_sum) {
    const float most = fmaxf(row_max, other_max), base = SoftmaxBase(most);
    row_sum = row_sum * Exp2(row_max - base) + other_sum * Exp2(other_max - base);
    row_max = most;
  };
  constexpr int kTogether = 8;
#pragma unroll 1
  for (int first = first_of_lane; first < end; first += kTogether * lanes) {
    float part_max[kTogether], part_sum[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const float* ends = part(min(first + i * lanes, num_parts - 1)) + own;
      part_max[i] = __ldcg(ends + shape.row_max()), part_sum[i] = __ldcg(ends + shape.row_sum());
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (first + i * lanes >= num_parts) continue;
      factor[first + i * lanes] = part_max[i];
      add(part_max[i], part_sum[i]);
    }
  }
#pragma unroll 1
  for (int step = lanes / 2; step > 0; step /= 2) {
    const float other_max = __shfl_xor_sync(kAllLanes, row_max, step);
    add(other_max, __shfl_xor_sync(kAllLanes, row_sum, step));
  }
  if (own < rows) {
    const RowPlace at = place_of(own);
    const RowEnd row_end = {row_max, row_sum, p.Sink(at.head)};
    if (first_of_lane == 0) p.StoreLse(at.token, at.head, row_end);
    const float whole = row_end.Factor() * p.ValueScale(tile.index, at.kv_head);
    const float base = SoftmaxBase(row_max);
#pragma unroll 1
    for (int n = first_of_lane; n < stride; n += lanes) {
      factor[n] = n < num_parts ? Exp2(factor[n] - base) * whole : 0.f;
    }
  }
  SyncNamed(kSwapConsumers, S::kConsumerThreads);

  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int first_row = warp * kRows; first_row < rows; first_row += kRows * S::kConsumerWarps) {
    auto row_of = [&](int r) { return min(first_row + r, rows - 1); };  // the last one again
    float2 sum[kRows][kVectors] = {};
#pragma unroll 1
    for (int first = 0; first < num_parts; first += kParts) {
      float2 x[kRows][kParts][kVectors];
#pragma unroll
      for (int n = 0; n < kParts; ++n) {
        const float* from = part(min(first + n, num_parts - 1)) + lane * 2;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int i = 0; i < kVectors; ++i) {
            // Past L1, where another block's results may be missing.
            x[r][n][i] =
                __ldcg(reinterpret_cast<const float2*>(from + row_of(r) * S::kValueDims + i * 64));
          }
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float4 by = *reinterpret_cast<const float4*>(factors + row_of(r) * stride + first);
        const float each[kParts] = {by.x, by.y, by.z, by.w};
#pragma unroll
        for (int n = 0; n < kParts; ++n) {
#pragma unroll
          for (int i = 0; i < kVectors; ++i) {
            sum[r][i].x = fmaf(x[r][n][i].x, each[n], sum[r][i].x);
            sum[r][i].y = fmaf(x[r][n][i].y, each[n], sum[r][i].y);
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const RowPlace at = place_of(row_of(r));
      Out* const to = reinterpret_cast<Out*>(p.out.data) + at.token * p.out.stride_token +
                      at.head * p.out.stride_head;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int d = lane * 2 + i * 64;
        if (d >= p.v.head_size) continue;
        if (p.out_pairs) {
          *reinterpret_cast<uint32_t*>(to + d) = Pack<Out>(sum[r][i].x, sum[r][i].y);
        } else {
          to[d * p.out.stride_dim] = static_cast<Out>(sum[r][i].x);
          if (d + 1 < p.v.head_size) {
            to[(d + 1) * p.out.stride_dim] = static_cast<Out>(sum[r][i].y);
          }
        }
      }
    }
  }
}

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_COMBINE_MANY_CUH_
