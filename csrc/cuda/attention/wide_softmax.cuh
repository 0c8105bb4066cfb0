// From products to weights: the softmax of wide's rows.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_SOFTMAX_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_SOFTMAX_CUH_

#include "cuda/attention/mma.cuh"
#include "cuda/attention/wide_shared.cuh"

namespace flashxla::attention {

#if defined(FLASHXLA_HOPPER)

// What is known of a thread's two rows up to now.
struct RowSums {
  // Of the unscaled scores; of this thread's columns.
  float row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {};
};

// The softmax state of a warpgroup's 64 rows. A thread holds parts of two rows.
struct RowState : RowSums {
  int begin[2], end[2];    // keys that each row sees
  int begin_all, end_all;  // keys that all 64 rows see
  int diagonal;            // ALiBi: position of the first of the two rows among the keys

  // For rows row0 and row0 + 8 of a q tile, which are part of warpgroup `group`.
  template <typename S>
  __device__ RowState(const TileRows<S>& of, const ManyTile& tile, const TileRule& rule, int group,
                      int row0) {
    begin_all = rule.Visible(of.Query(group * 64 + 63)).begin;
    end_all = rule.Visible(of.Query(group * 64)).end;
    diagonal = tile.first_query + row0 + (tile.s.length - tile.s.num_queries);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Rows past the sequence's last are computed but not stored.
      const KeyRange keys = rule.Visible(of.Query(row0 + 8 * r));
      begin[r] = keys.begin, end[r] = keys.end;
    }
  }
};

// Weights of a row are relative to its largest score. Where sums are scaled lazily, to an earlier
// one that is smaller by at most so much (log2): that seldom changes after a row's first keys.
constexpr float kLazyLog2 = 6.f;

// A thread has 2 of each 8 columns of a row: a bit for each of its columns that lie before column
// `end`, which counts from its first one.
template <int kColumns>
__device__ inline uint32_t ColumnsBelow(int end) {
  static_assert(kColumns <= 128);
  const int inside = min(max(end, 0), kColumns);
  return __funnelshift_lc(~0u, 0u, inside / 8 * 2 + min(inside % 8, 2));
}

// Turns scores into weights, 2^kLift times as large. `factor`: what a row's sums are still to be
// multiplied by.
template <typename S, int kLift, bool kLazy>
__device__ void OnlineSoftmax(float (&score)[S::kKeys / 2], RowState& rows, const TileRule& rule,
                              int first_key, float (&factor)[2]) {
  constexpr int kColumns = S::kKeys;
  constexpr bool kAlibi = S::kAlibi;
  const int lane = threadIdx.x & 31;
  auto mask = [&] {
    if (first_key + kColumns <= rows.end_all && first_key >= rows.begin_all) return;
    const int offset = first_key + lane % 4 * 2;  // of this thread's first column
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t seen = ColumnsBelow<kColumns>(rows.end[r] - offset) &
                            ~ColumnsBelow<kColumns>(rows.begin[r] - offset);
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i) {
        float& x = score[i / 2 * 4 + 2 * r + i % 2];
        x = seen & 1u << i ? x : -INFINITY;
      }
    }
  };
  if (S::kSoftcap && rule.softcap > 0.f) {
    mask();  // scores of keys that do not exist may be NaN, which four share
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) score[i] *= rule.softcap;
#pragma unroll
    for (int i = 0; i < kColumns / 2; i += i % 4 == 0 ? 2 : 6) {  // four of a row
      TanhFromLog2(score[i], score[i + 1], score[i + 4], score[i + 5]);
    }
  }
  const float scale = rule.rest<kAlibi>();
  if (kAlibi && rule.slope != 0.f) {
    // A difference of two positions, which integers hold exactly, of less than 2^24 in most calls.
    const float distance = static_cast<float>(rows.diagonal - first_key - lane % 4 * 2);
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const float d = distance + static_cast<float>(i / 2 % 2 * 8 - (i / 4 * 8 + i % 2));
      score[i] = fmaf(score[i], rule.scale, -rule.slope * fabsf(d));
    }
  }
  mask();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float row_max = rows.row_max[r];
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i) {
      row_max = fmaxf(row_max, fmaxf(score[i * 4 + 2 * r], score[i * 4 + 2 * r + 1]));
    }
    row_max = MaxOfRow(row_max);
    const float before = rows.row_max[r];
    if (kLazy && (row_max - before) * scale <= kLazyLog2) row_max = before;
    const float base = row_max == -INFINITY ? 0.f : __fmul_rn(row_max, scale);
    // Rounded as the base is, so that it is exactly 1 where a row sees none of these keys.
    factor[r] = kLazy && row_max == before ? 1.f : Exp2(__fmul_rn(before, scale) - base);
    const float lifted = kLift > 0 ? kLift - base : -base;
    rows.row_max[r] = row_max;
    float row_sum = 0.f;
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& x = score[i * 4 + 2 * r + j];
        x = Exp2(fmaf(x, scale, lifted));
        row_sum += x;
      }
    }
    rows.row_sum[r] = rows.row_sum[r] * factor[r] + row_sum;
  }
}

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_SOFTMAX_CUH_
