// Attention of one warp: 16 rows (WarpRows) times 16 keys at a time, with an online softmax in
// float32.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_WARP_ATTENTION_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_WARP_ATTENTION_CUH_

#include <type_traits>

#include "cuda/attention/key_loader.cuh"
#include "cuda/attention/warp.cuh"
#include "cuda/attention/warp_rows.cuh"

namespace flashxla::attention {

// T is the dtype of the matrix products, Out that of the output and of 16-bit queries. They differ
// for bf16 queries with fp8 keys: widening fp8 to f16 costs a quarter of widening it to bf16, so
// the products are in f16. A power of two per row brings the queries into f16's range.
template <typename T, int kDims, typename Out = T>
struct WarpAttention {
  static constexpr int kChunks = kDims / 8;

  uint32_t q[kDims / 16][4];
  float out[kDims / 8][4];       // not normalized yet
  float row_max[2], row_sum[2];  // largest score (log2); this lane's share of the sum
  WarpRows rows;
  float row_scale[2];  // undoes the row's power of two

  // Starts a q tile: rows [first_row, first_row + 16) of a sequence and KV head.
  __device__ void Begin(const Problem& p, const Sequence& s, int index, int kv_head,
                        int first_row) {
    const int lane = threadIdx.x & 31;
    const int num_rows = s.num_queries * p.group_size;
    rows.Begin(p, s, index, kv_head, first_row);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + lane / 4 + 8 * r;
      const int query = row / p.group_size, head = kv_head * p.group_size + row % p.group_size;
      const bool exists = row < num_rows;
      row_max[r] = -INFINITY, row_sum[r] = 0.f;
      const int64_t base = (s.first_query + query) * p.q.stride_token + head * p.q.stride_head;
      const auto* pairs = reinterpret_cast<const uint32_t*>(p.q.data + base * 2) + lane % 4;
      const bool fast = p.q_pairs && p.k.head_size == kDims;
#pragma unroll
      for (int k = 0; k < kDims / 16; ++k) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          q[k][half * 2 + r] = fast && exists ? pairs[k * 8 + half * 4] : 0;
        }
      }
      if (!fast && exists) {
#pragma unroll
        for (int k = 0; k < kDims / 16; ++k) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int d = k * 16 + half * 8 + lane % 4 * 2;
            if (d < p.k.head_size) q[k][half * 2 + r] = LoadElements(p, base, d);
          }
        }
      }
      if constexpr (!std::is_same_v<T, Out>) row_scale[r] = Rescale(r);
    }
#pragma unroll
    for (int n = 0; n < kDims / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[n][i] = 0.f;
    }
  }

  // Processes keys [first, first + 16). `mask` says which of them exist.
  __device__ void Step(const Problem& p, uint32_t keys, uint32_t values, int first, uint32_t mask) {
    const int lane = threadIdx.x & 31;
    float score[2][4] = {};
    {
      const int row = (lane & 7) + (lane >> 4) * 8, chunk = (lane >> 3) & 1;
#pragma unroll
      for (int k = 0; k < kDims / 16; ++k) {
        uint32_t b[4];
        LoadMatrices(b, keys + ChunkOffset<kChunks>(row, 2 * k + chunk));
        Multiply<T>(score[0], q[k], b[0], b[1]);
        Multiply<T>(score[1], q[k], b[2], b[3]);
      }
    }
    if constexpr (!std::is_same_v<T, Out>) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) score[n][i] *= row_scale[i / 2];
      }
    }
    rows.Score(p, first, mask, score);
    float factor[2];
    bool max_changed = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float high = fmaxf(fmaxf(score[0][2 * r], score[0][2 * r + 1]),
                               fmaxf(score[1][2 * r], score[1][2 * r + 1]));
      const float new_max = fmaxf(row_max[r], MaxOfRow(high));
      const float base = SoftmaxBase(new_max);
      factor[r] = Exp2(row_max[r] - base);
      max_changed |= new_max != row_max[r];
      row_max[r] = new_max;
      float added = 0.f;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = score[n][2 * r + i];
          x = Exp2(x - base);
          added += x;
        }
      }
      row_sum[r] = row_sum[r] * factor[r] + added;
    }
    if (__any_sync(kAllLanes, max_changed)) {
#pragma unroll
      for (int n = 0; n < kDims / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[n][i] *= factor[i / 2];
      }
    }
    const uint32_t a[4] = {Pack<T>(score[0][0], score[0][1]), Pack<T>(score[0][2], score[0][3]),
                           Pack<T>(score[1][0], score[1][1]), Pack<T>(score[1][2], score[1][3])};
    const int row = (lane & 7) + ((lane >> 3) & 1) * 8, chunk = lane >> 4;
#pragma unroll
    for (int n = 0; n < kDims / 16; ++n) {
      uint32_t b[4];
      LoadMatricesTransposed(b, values + ChunkOffset<kChunks>(row, 2 * n + chunk));
      Multiply<T>(out[2 * n], a, b[0], b[1]);
      Multiply<T>(out[2 * n + 1], a, b[2], b[3]);
    }
  }

  // Adds up the lanes' shares of row_sum.
  __device__ void ReduceRowSums() {
#pragma unroll
    for (int r = 0; r < 2; ++r) row_sum[r] = SumOfRow(row_sum[r]);
  }

  // Writes the rows. ReduceRowSums must have been called.
  __device__ void Store(const Problem& p, const Sequence& s, int index, int kv_head,
                        int first_row) const {
    const int lane = threadIdx.x & 31;
    const float value_scale = p.ValueScale(index, kv_head);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + lane / 4 + 8 * r;
      if (row >= s.num_queries * p.group_size) continue;
      const int token = s.first_query + row / p.group_size;
      const int head = kv_head * p.group_size + row % p.group_size;
      const RowEnd end = {row_max[r], row_sum[r], p.Sink(head)};
      const float factor = end.Factor() * value_scale;
      if (lane % 4 == 0) p.StoreLse(token, head, end);
      Out* to = reinterpret_cast<Out*>(p.out.data) + token * p.out.stride_token +
                head * p.out.stride_head;
#pragma unroll
      for (int n = 0; n < kDims / 8; ++n) {
        const int d = n * 8 + lane % 4 * 2;
        if (d >= p.v.head_size) continue;
        const uint32_t pair = Pack<Out>(out[n][2 * r] * factor, out[n][2 * r + 1] * factor);
        if (p.out_pairs) {
          *reinterpret_cast<uint32_t*>(to + d) = pair;
        } else {
          StoreElements(p, to, d, pair);
        }
      }
    }
  }

 private:
  // Converts a row's bf16 queries to T, scaled to numbers near 1 by a power of two. Returns the
  // factor that undoes it.
  __device__ float Rescale(int r) {
    auto values = [&](int k, int half) {
      return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(q[k][half * 2 + r]));
    };
    float largest = 0.f;
#pragma unroll
    for (int k = 0; k < kDims / 16; ++k) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 x = values(k, half);
        largest = fmaxf(largest, fmaxf(fabsf(x.x), fabsf(x.y)));
      }
    }
    const float power = PowerOfTwoBelow(MaxOfRow(largest));  // NaN and infinity stay what they are
#pragma unroll
    for (int k = 0; k < kDims / 16; ++k) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 x = values(k, half);
        q[k][half * 2 + r] = Pack<T>(x.x / power, x.y / power);
      }
    }
    return power;
  }

  // Elements d and d + 1 of a row with any strides and dtype. Not inlined, to keep the code of the
  // usual case short: a short kernel pays for loading its instructions.
  __device__ __noinline__ static uint32_t LoadElements(const Problem& p, int64_t base, int d) {
    const float x = LoadFloat(p.q.data, base + d * p.q.stride_dim, p.q_dtype);
    const float y = d + 1 < p.k.head_size
                        ? LoadFloat(p.q.data, base + (d + 1) * p.q.stride_dim, p.q_dtype)
                        : 0.f;
    return Pack<Out>(x, y);
  }
  __device__ __noinline__ static void StoreElements(const Problem& p, Out* to, int d,
                                                    uint32_t pair) {
    const Out* x = reinterpret_cast<const Out*>(&pair);
    to[d * p.out.stride_dim] = x[0];
    if (d + 1 < p.v.head_size) to[(d + 1) * p.out.stride_dim] = x[1];
  }
};

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_WARP_ATTENTION_CUH_
