// What the tile engines keep in registers: 16 rows of a warp, and what becomes of scores. A thread
// block owns 64 rows, 16 per warp: of Q and grad_out, or of K and V. It goes over tiles of the
// other two, which all of its warps share.
//
// A float tile [16, n] lies in registers as matrix instructions have it: lane l holds rows l / 4
// and l / 4 + 8 of columns 2 * (l % 4) and the next, of each 8 columns.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_TILE_SCORES_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_TILE_SCORES_CUH_

#include "cuda/attention/mma.cuh"
#include "cuda/attention_backward/problem.cuh"

namespace flashxla::attention_backward {

constexpr int kSliceRows = 16;
constexpr int kOwnRows = kRowTile;
constexpr int kTileWarps = kOwnRows / kSliceRows, kTileThreads = 32 * kTileWarps;

// A float tile with kColumns columns, 8 by 8. No alias of an array: nvcc 12.4 fails on that.
template <int kColumns>
struct Columns {
  float values[kColumns / 8][4];

  __device__ float (&operator[](int n))[4] { return values[n]; }
  __device__ const float (&operator[](int n) const)[4] { return values[n]; }
};

template <int kColumns>
__device__ void SetZero(Columns<kColumns>& x) {
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[n][i] = 0.f;
  }
}

// lse2 and delta of the elements x[n] of a tile, for some n.
struct RowSums {
  float lse2[4], delta[4];
};

// Turns dots, q times k, into the weights, and, if kGrads, grads, grad_out times v, into the
// gradients of q times k but for the factor softmax_scale. `place` says where in the scores the
// tile lies:
//   RowSums Sums(int n)             of the elements x[n]
//   bool Sees(int n, int i)         whether x[n][i]'s query sees its key
//   int64_t Distance(int n, int i)  x[n][i]'s: see Problem::Score
template <bool kGrads, int kColumns, typename Place>
__device__ void Weigh(const Problem& p, const Place& place, float slope, bool masked,
                      Columns<kColumns>& dots, Columns<kColumns>& grads) {
  if (p.softcap <= 0.f && p.alibi_slopes.data == nullptr) {
    const float scale2 = p.softmax_scale * kLog2e;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      const RowSums sums = place.Sums(n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        dots[n][i] = attention::Exp2(fmaf(dots[n][i], scale2, -sums.lse2[i]));
        if constexpr (kGrads) grads[n][i] = dots[n][i] * (grads[n][i] - sums.delta[i]);
      }
    }
  } else {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      const RowSums sums = place.Sums(n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float derivative;
        const float score =
            p.Score(dots[n][i] * p.softmax_scale, slope, place.Distance(n, i), &derivative);
        dots[n][i] = attention::Exp2(fmaf(score, kLog2e, -sums.lse2[i]));
        if constexpr (kGrads) grads[n][i] = dots[n][i] * (grads[n][i] - sums.delta[i]) * derivative;
      }
    }
  }
  if (!masked) return;
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool sees = place.Sees(n, i);
      dots[n][i] = sees ? dots[n][i] : 0.f;
      if constexpr (kGrads) grads[n][i] = sees ? grads[n][i] : 0.f;
    }
  }
}

}  // namespace flashxla::attention_backward

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_TILE_SCORES_CUH_
