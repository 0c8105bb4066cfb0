// The end of a call with split-KV: partial results become rows, and tokens that no engine computes
// are written.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_COMBINE_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_COMBINE_CUH_

#include <type_traits>

#include "cuda/attention/split.cuh"
#include "cuda/attention/warp.cuh"

namespace flashxla::attention {

// Writes a token that no engine computes: out 0, LSE -inf or the sink. One warp per token.
__device__ inline void StoreIdle(const Problem& p, int token, bool in_sequence) {
  const int lane = threadIdx.x & 31;
  const int size = p.out_dtype == FLASHXLA_F32 ? 4 : 2;
  char* row = p.out.data + token * p.out.stride_token * size;
  const int64_t stride = p.out.stride_head * size;
  const int vectors = p.v.head_size * size / 16;
  const bool aligned = p.out.stride_dim == 1 && p.v.head_size * size % 16 == 0 &&
                       stride % 16 == 0 && reinterpret_cast<uintptr_t>(row) % 16 == 0;
  for (int head = 0; head < p.num_heads; ++head) {
    if (aligned) {
      for (int i = lane; i < vectors; i += 32) {
        reinterpret_cast<uint4*>(row + head * stride)[i] = make_uint4(0, 0, 0, 0);
      }
    } else {
      for (int d = lane; d < p.v.head_size; d += 32) p.StoreOut(token, head, d, 0.f);
    }
    if (lane == 0) p.StoreLse(token, head, in_sequence ? p.Sink(head) : -INFINITY);
  }
}

// A row that a warp puts together from its parts.
template <int kDims>
struct CombinedRow {
  static constexpr int kEach = kDims / 32;  // dims of a lane, in vectors
  static constexpr int kVector = kEach < 4 ? kEach : 4, kVectors = kEach / kVector;
  static_assert(kVectors * kVector == kEach && kVector % 2 == 0);
  using Vector = std::conditional_t<kVector == 4, float4, float2>;
  struct Values {  // of a part
    Vector vectors[kVectors];
  };
  float row_max = -INFINITY, row_sum = 0.f, out[kEach] = {};

  // The first dim of a lane's vector.
  __device__ static int Dim(int vector) {
    return (vector * 32 + static_cast<int>(threadIdx.x & 31)) * kVector;
  }

  // Adds the sums of 32 parts, one of each lane; part_max is -inf where there is none. Returns what
  // the values of the lane's part are multiplied by.
  __device__ float AddSums(float part_max, float part_sum) {
    const float new_max = fmaxf(MaxOfWarp(part_max), row_max);
    const float shift = SoftmaxBase(new_max);
    const float old_factor = exp2f(row_max - shift), factor = exp2f(part_max - shift);
    row_max = new_max;
    part_sum = SumOfWarp(part_sum * factor);
    row_sum = row_sum * old_factor + part_sum;
    for (float& x : out) x *= old_factor;
    return factor;
  }

  __device__ void AddValues(const Values& values, float factor) {
    const float* x = reinterpret_cast<const float*>(&values);
#pragma unroll
    for (int i = 0; i < kEach; ++i) out[i] += factor == 0.f ? 0.f : x[i] * factor;
  }

  // row: in the q tile.
  __device__ void Store(const Problem& p, int kv_head, const SplitTile& tile, int row) const {
    const RowPlace place = p.PlaceOf(tile.first_query, kv_head, tile.first_row + row);
    const int token = place.token, head = place.head;
    const RowEnd end = {row_max, row_sum, p.Sink(head)};
    const float whole = end.Factor() * p.ValueScale(tile.index, place.kv_head);
    if ((threadIdx.x & 31) == 0) p.StoreLse(token, head, end);
#pragma unroll
    for (int i = 0; i < kEach; i += 2) {
      const int d = Dim(i / kVector) + i % kVector;
      const float pair[2] = {out[i] * whole, out[i + 1] * whole};
      if (p.out_pairs) {
        if (d < p.v.head_size) p.StoreOutPair(token, head, d, pair);
      } else {
        if (d < p.v.head_size) p.StoreOut(token, head, d, pair[0]);
        if (d + 1 < p.v.head_size) p.StoreOut(token, head, d + 1, pair[1]);
      }
    }
  }
};

// Writes the tokens that no engine computes: a warp has every `count`th, from token `first` on.
__device__ inline void StoreIdleTokens(const Problem& p, int first, int count) {
  const int lane = threadIdx.x & 31;
  for (int base = first; base < p.num_tokens; base += 32 * count) {
    const int token = base + lane * count;
    const int mark = token < p.num_tokens ? p.plan.token_sequence[token] : 0;
    for (unsigned idle = __ballot_sync(kAllLanes, mark < 0); idle != 0; idle &= idle - 1) {
      const int i = __ffs(idle) - 1;
      StoreIdle(p, base + i * count, IsKeyless(__shfl_sync(kAllLanes, mark, i)));
    }
  }
}

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_COMBINE_CUH_
