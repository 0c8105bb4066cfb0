// The 16 rows of a warp's matrix products, and how their dot products become scores.
//
// A row is one query token of one query head. The heads that share a KV head are neighbouring rows,
// so that keys are read once for all of them. Lane l holds parts of rows l / 4 and l / 4 + 8.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_WARP_ROWS_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_WARP_ROWS_CUH_

#include "cuda/attention/problem.cuh"

namespace flashxla::attention {

struct WarpRows {
  float slope[2];
  int begin[2], end[2];    // keys that each row sees
  int begin_all, end_all;  // keys that all 16 rows see
  int64_t diagonal[2];     // position of each row among the keys
  float scale;             // factor of the dot products; includes log2(e) if plain
  bool plain;              // no softcap, no ALiBi

  // Rows [first_row, first_row + 16) of a sequence and KV head.
  __device__ void Begin(const Problem& p, const Sequence& s, int index, int kv_head,
                        int first_row) {
    const int num_rows = s.num_queries * p.group_size;
    scale = p.ScoreScale(index, kv_head);
    plain = p.softcap <= 0.f && p.alibi_slopes.data == nullptr;
    if (plain) scale *= kLog2e;
    const int last_row = min(first_row + 15, num_rows - 1);
    begin_all = p.Visible(s, last_row / p.group_size).begin;
    end_all = p.Visible(s, first_row / p.group_size).end;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + static_cast<int>(threadIdx.x & 31) / 4 + 8 * r;
      const int query = row / p.group_size, head = kv_head * p.group_size + row % p.group_size;
      slope[r] = 0.f, begin[r] = 0, end[r] = 0;
      diagonal[r] = int64_t{query} + s.length - s.num_queries;
      if (row < num_rows) {
        const KeyRange keys = p.Visible(s, query);
        begin[r] = keys.begin, end[r] = keys.end;
        slope[r] = p.alibi_slopes.at(index, head, 0.f);
      }
    }
  }

  // Turns dot products with keys [first, first + 8 kTiles) into scores, in log2. `mask` says which
  // of these keys exist.
  template <int kTiles>
  __device__ void Score(const Problem& p, int first, uint32_t mask,
                        float (&score)[kTiles][4]) const {
    constexpr uint32_t kAll = kTiles < 4 ? (1u << kTiles * 8) - 1 : ~0u;
    static_assert(kTiles <= 4);
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) score[n][i] *= scale;
    }
    if (!plain) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = first + n * 8 + lane % 4 * 2 + i % 2, r = i / 2;
          score[n][i] = p.Score(score[n][i], slope[r], diagonal[r] - key) * kLog2e;
        }
      }
    }
    if (mask == kAll && first >= begin_all && first + kTiles * 8 <= end_all) return;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = n * 8 + lane % 4 * 2 + i % 2, key = first + column, r = i / 2;
        const bool seen = (mask >> column) & 1 && key >= begin[r] && key < end[r];
        if (!seen) score[n][i] = -INFINITY;
      }
    }
  }
};

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_WARP_ROWS_CUH_
