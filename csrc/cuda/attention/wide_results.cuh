// The results of wide's rows, as a call returns them.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_RESULTS_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_RESULTS_CUH_

#include "cuda/attention/wide_odd.cuh"
#include "cuda/attention/wide_softmax.cuh"

namespace flashxla::attention {

#if defined(FLASHXLA_HOPPER)

// Four lanes that have x[j] of column j each exchange them: each gets a row, x[i] of lane i.
__device__ inline void TransposeQuad(uint32_t (&x)[4]) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool high = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      uint32_t &low_word = x[i], &high_word = x[i + step];
      const uint32_t other = __shfl_xor_sync(kAllLanes, high ? low_word : high_word, step);
      (high ? low_word : high_word) = other;
    }
  }
}

// Normalizes and writes rows row0 and row0 + 8 of a q tile.
template <typename T, int kDims, int kLift, typename S>
__device__ void StoreRows(const Problem& p, const TileRows<S>& of, const ManyTile& tile,
                          const TileRule& rule, int row0, const RowState& rows,
                          const float (&out)[kDims / 2]) {
  const int lane = threadIdx.x & 31;
  constexpr float kLower = 1.f / (1 << kLift);
  const float scale = rule.rest<S::kAlibi>(), value_scale = rule.value_scale * kLower;
  bool exists[2];
  float whole[2];
  T* to[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float row_sum = SumOfRow(rows.row_sum[r]);
    const int row = row0 + 8 * r, offset = of.Query(row),
              head = tile.head + row - offset * of.heads();
    const int query = tile.first_query + offset, token = tile.s.first_query + query;
    exists[r] = query < tile.s.num_queries && offset < of.tokens();
    const RowEnd end = {rows.row_max[r] * scale, row_sum * kLower, p.Sink(head)};
    if (exists[r] && lane % 4 == 0) p.StoreLse(token, head, end);
    whole[r] = end.Factor() * value_scale;
    to[r] =
        reinterpret_cast<T*>(p.out.data) + token * p.out.stride_token + head * p.out.stride_head;
  }
  // A lane has 2 of each 8 columns. After the exchange it stores all 8, since the number of stores
  // counts: each takes a cycle for each row.
#pragma unroll
  for (int i = 0; i < kDims / 8; i += 4) {
    const int d = (i + lane % 4) * 8;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* pair = &out[(i + j) * 4 + 2 * r];
        x[j] = Pack<T>(pair[0] * whole[r], pair[1] * whole[r]);
      }
      TransposeQuad(x);
      if (!exists[r] || d >= p.v.head_size) continue;
      if constexpr (S::kOddHeads) {
        StoreOddOutput(of.w, to[r], d, x);
      } else {
        StoreGlobal16(to[r] + d, x);
      }
    }
  }
}

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_RESULTS_CUH_
