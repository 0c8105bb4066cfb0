// What the kernels of large have in common: of 64 rows, a half of the warps has the scores with
// half of the keys of a kv tile and, of all its keys, half of the values' columns.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_LARGE_HALF_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_LARGE_HALF_CUH_

#include "cuda/attention/large_rows.cuh"
#include "cuda/attention/mma.cuh"
#include "cuda/attention/problem.cuh"
#include "cuda/attention/warp.cuh"

namespace flashxla::attention {

constexpr int kLargeGroups = kLargeRows / 16;  // warps of a half: each has 16 rows

// In shared memory: what each half of the keys adds to a row.
struct LargeExchange {
  float row_max[2][kLargeRows], row_sum[2][kLargeRows];
};

// A warp's part in the softmax of its 16 rows. Lane l has parts of rows l / 4 and l / 4 + 8.
class LargeHalf {
 protected:
  __device__ explicit LargeHalf(LargeExchange& shared) : exchange(shared) {}

  __device__ static int lane() { return static_cast<int>(threadIdx.x & 31); }
  __device__ static int warp() { return static_cast<int>(threadIdx.x / 32); }
  __device__ static int group() { return warp() % kLargeGroups; }
  // The row that is this lane's r-th.
  __device__ static int Row(int r) { return group() * 16 + lane() / 4 + 8 * r; }

  __device__ __forceinline__ void BeginRows() {
#pragma unroll
    for (int r = 0; r < 2; ++r) row_max[r] = -INFINITY, row_sum[r] = 0.f;
  }

  // Puts the rows' largest scores where the other half's warp finds them.
  template <int kTiles>
  __device__ __forceinline__ void GiveMax(const float (&score)[kTiles][4]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float high = -INFINITY;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        high = fmaxf(high, fmaxf(score[n][2 * r], score[n][2 * r + 1]));
      }
      high = MaxOfRow(high);
      if (lane() % 4 == 0) exchange.row_max[half][Row(r)] = high;
    }
  }

  // Turns scores into weights: calls give(r, n, x, y) with those of the lane's r-th row and the
  // n-th 8 keys. factor: of what came before. Returns whether that is to be multiplied by it.
  template <int kTiles, typename Give>
  __device__ __forceinline__ bool Weigh(const float (&score)[kTiles][4], float (&factor)[2],
                                        Give&& give) {
    bool changed = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float new_max =
          fmaxf(row_max[r], fmaxf(exchange.row_max[0][Row(r)], exchange.row_max[1][Row(r)]));
      const float base = SoftmaxBase(new_max);
      factor[r] = Exp2(row_max[r] - base);
      changed = changed || new_max != row_max[r];
      row_max[r] = new_max;
      float added = 0.f;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const float x = Exp2(score[n][2 * r] - base), y = Exp2(score[n][2 * r + 1] - base);
        added += x + y;
        give(r, n, x, y);
      }
      row_sum[r] = row_sum[r] * factor[r] + added;
    }
    return __any_sync(kAllLanes, changed);
  }

  // Puts this half's share of the rows' sums where the other half's warp finds it.
  __device__ void GiveSum() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = SumOfRow(row_sum[r]);
      if (lane() % 4 == 0) exchange.row_sum[half][Row(r)] = sum;
    }
  }
  __device__ float SumOf(int r) const {
    return exchange.row_sum[0][Row(r)] + exchange.row_sum[1][Row(r)];
  }

  LargeExchange& exchange;
  const int half = FromFirstLane(warp() / kLargeGroups);  // descriptors depend on it
  float row_max[2], row_sum[2];  // largest score (log2); this lane's share of the sum
};

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_LARGE_HALF_CUH_
