// A q tile of few rows on CUDA cores, where split32 does not take it. Memory bandwidth is the
// limit: the warps divide the keys among them, read them straight from global memory, and combine
// their results at the end.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_SIMT_FEW_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_SIMT_FEW_CUH_

#include "cuda/attention/simt_item.cuh"

namespace flashxla::attention {

constexpr int kFewRows = 8;        // q tiles of more rows use Tf32Tile
constexpr int kFewRowsAtOnce = 4;  // the keys are read once per this many rows

template <int kDims, int kWarps>
struct alignas(16) SimtFewShared {
  float q[kFewRows * kDims];
  float out[kWarps][kFewRowsAtOnce][kDims];  // of each warp
  float row_max[kWarps][kFewRowsAtOnce], row_sum[kWarps][kFewRowsAtOnce];
  SimtRow rows[kFewRows];
};

template <int kDims, int kWarps, bool kFp8>
class SimtFew {
 public:
  using Shared = SimtFewShared<kDims, kWarps>;

  // All threads of the block must call this. `shared` and `item` are in use until the block's next
  // barrier.
  __device__ static void Attend(const Problem& p, const SimtItem& item, Shared& shared) {
    LoadQueries<kDims, kDims>(p, item, kFewRows, shared.q);
    if (threadIdx.x < kFewRows) shared.rows[threadIdx.x] = item.Row(p, threadIdx.x);
    __syncthreads();
    for (int row = 0; row < item.num_rows; row += kFewRowsAtOnce) {
      AttendRows(p, item, row, shared);
      __syncthreads();
      Combine(p, item, row, shared);
      __syncthreads();
    }
  }

 private:
  // kLanes lanes share a key, 8 dims each: dims [d, d + 4) of both halves of the row.
  static constexpr int kRows = kFewRowsAtOnce;
  static constexpr int kLanes = kDims / 8, kGroups = 32 / kLanes;
  static constexpr int kUnroll = 2;  // keys in flight per group

  __device__ static void AttendRows(const Problem& p, const SimtItem& item, int first_row,
                                    Shared& shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int group = lane / kLanes, d = lane % kLanes * 4;
    float row_max[kRows], row_sum[kRows], out[kRows][8] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) row_max[r] = -INFINITY, row_sum[r] = 0.f;

    // 32 keys at a time: each lane locates one.
    for (int first = item.begin + warp * 32; first < item.end; first += kWarps * 32) {
      int64_t k_offset = 0, v_offset = 0;
      const unsigned found =
          __ballot_sync(kAllLanes, item.Find(p, first + lane, &k_offset, &v_offset));
#pragma unroll 1
      for (int step = 0; step < 32 && first + step < item.end; step += kGroups * kUnroll) {
        float4 k[kUnroll][2], v[kUnroll][2];
        bool exists[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int at = step + u * kGroups + group;
          const int64_t k_at = __shfl_sync(kAllLanes, k_offset, at);
          const int64_t v_at = __shfl_sync(kAllLanes, v_offset, at);
          exists[u] = (found >> at) & 1;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            k[u][half] = v[u][half] = make_float4(0.f, 0.f, 0.f, 0.f);
            if (exists[u]) {
              k[u][half] = LoadFour<kFp8>(p, p.k, k_at, half * kDims / 2 + d);
              v[u][half] = LoadFour<kFp8>(p, p.v, v_at, half * kDims / 2 + d);
            }
          }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float* q = shared.q + (first_row + r) * kDims;
          const float4 q0 = *reinterpret_cast<const float4*>(q + d);
          const float4 q1 = *reinterpret_cast<const float4*>(q + kDims / 2 + d);
          const SimtRow row = shared.rows[first_row + r];
          float score[kUnroll];
          float new_max = row_max[r];
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) {
            float dot = Dot(q0, k[u][0]) + Dot(q1, k[u][1]);
#pragma unroll
            for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
              dot += __shfl_xor_sync(kAllLanes, dot, lanes);
            }
            const int j = first + step + u * kGroups + group;
            score[u] = item.Score(p, row, j, exists[u], dot);
            new_max = fmaxf(new_max, score[u]);
          }
          const float base = SoftmaxBase(new_max);
          const float factor = exp2f(row_max[r] - base);
          row_max[r] = new_max;
          row_sum[r] *= factor;
#pragma unroll
          for (int i = 0; i < 8; ++i) out[r][i] *= factor;
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) {
            const float weight = exp2f(score[u] - base);
            if (weight == 0.f) continue;  // the value may be NaN
            row_sum[r] += weight;
            Add(weight, v[u][0], out[r]);
            Add(weight, v[u][1], out[r] + 4);
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      CombineGroups(&row_max[r], &row_sum[r], out[r]);
      if (group != 0) continue;
      float* to = shared.out[warp][r];
      *reinterpret_cast<float4*>(to + d) = make_float4(out[r][0], out[r][1], out[r][2], out[r][3]);
      *reinterpret_cast<float4*>(to + kDims / 2 + d) =
          make_float4(out[r][4], out[r][5], out[r][6], out[r][7]);
      if (lane == 0) shared.row_max[warp][r] = row_max[r], shared.row_sum[warp][r] = row_sum[r];
    }
  }

  __device__ static float Dot(const float4& a, const float4& b) {
    return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, a.w * b.w)));
  }

  __device__ static void Add(float weight, const float4& v, float* out) {
    out[0] = fmaf(weight, v.x, out[0]);
    out[1] = fmaf(weight, v.y, out[1]);
    out[2] = fmaf(weight, v.z, out[2]);
    out[3] = fmaf(weight, v.w, out[3]);
  }

  // Combines a row's state over the groups of the warp. Every group gets the result.
  __device__ static void CombineGroups(float* row_max, float* row_sum, float* out) {
    float new_max = *row_max;
#pragma unroll
    for (int lanes = kLanes; lanes < 32; lanes *= 2) {
      new_max = fmaxf(new_max, __shfl_xor_sync(kAllLanes, new_max, lanes));
    }
    const float factor = exp2f(*row_max - SoftmaxBase(new_max));
    *row_max = new_max;
    *row_sum *= factor;
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] *= factor;
#pragma unroll
    for (int lanes = kLanes; lanes < 32; lanes *= 2) {
      *row_sum += __shfl_xor_sync(kAllLanes, *row_sum, lanes);
#pragma unroll
      for (int i = 0; i < 8; ++i) out[i] += __shfl_xor_sync(kAllLanes, out[i], lanes);
    }
  }

  // Combines the warps' results for rows [first_row, first_row + kRows) and writes the rows.
  __device__ static void Combine(const Problem& p, const SimtItem& item, int first_row,
                                 const Shared& shared) {
    const float value_scale = p.ValueScale(item.index, item.kv_head);
    for (int i = threadIdx.x; i < kRows * kDims; i += 32 * kWarps) {
      const int r = i / kDims, d = i % kDims;
      if (first_row + r >= item.num_rows || d >= p.v.head_size) continue;
      float row_max = -INFINITY;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) row_max = fmaxf(row_max, shared.row_max[warp][r]);
      const float base = SoftmaxBase(row_max);
      float row_sum = 0.f, out = 0.f;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) {
        const float factor = exp2f(shared.row_max[warp][r] - base);
        row_sum += shared.row_sum[warp][r] * factor;
        out += shared.out[warp][r][d] * factor;
      }
      const int token = item.Token(p, first_row + r), head = item.Head(p, first_row + r);
      const RowEnd end = {row_max, row_sum, p.Sink(head)};
      if (d == 0) p.StoreLse(token, head, end);
      p.StoreOut(token, head, d, out * end.Factor() * value_scale);
    }
  }
};

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_SIMT_FEW_CUH_
