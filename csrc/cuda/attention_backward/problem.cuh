// A call of attention's gradients as the kernels see it.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_PROBLEM_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_PROBLEM_CUH_

#include "common/math_constants.h"
#include "cuda/attention/dtypes.cuh"
#include "cuda/attention/problem.cuh"
#include "cuda/attention_backward/plan.cuh"
#include "flashxla/attention_backward.h"

namespace flashxla::attention_backward {

using attention::PerHead;
using attention::PlannedSequence;
using attention::Rows;

// float32 [Hq, T].
struct LseRows {
  float* data;  // may be null
  int64_t stride_head, stride_token;

  __device__ float at(int token, int head) const {
    return data ? data[head * stride_head + token * stride_token] : 0.f;
  }
};

struct Problem {
  Rows q, k, v, grad_out, out, grad_q, grad_k, grad_v;  // of one dtype
  LseRows lse, grad_lse;
  Window window;
  int32_t num_tokens, num_keys;  // rows of q; of k
  int32_t num_heads, num_kv_heads, group_size;
  int32_t head_size, v_head_size;
  int32_t dtype, sink_dtype;  // flashxla_dtype
  // Whether rows of every tensor can be read and written 16 bytes at a time.
  bool vectors;
  float softmax_scale, softcap;
  PerHead alibi_slopes;
  const void* sinks;  // [Hq]; may be null, and then so is grad_sinks
  void* grad_sinks;
  int64_t sinks_stride, grad_sinks_stride;
  PlanView plan;
  // Of each query row, in the plan's row tiles: [Hq, num_tiles * kRowTile]. Rows that do not exist
  // have an lse2 of infinity, so that all of their weights are 0, and a delta of 0.
  float* lse2;   // the LSE times log2(e); infinity where the LSE is -inf
  float* delta;  // dot(grad_out, out) - grad_lse
  // For an engine that adds up grad_q in memory: [num_tiles, Hq, num_sums], 0 when it starts.
  float* sums;
  int32_t num_sums;
  int32_t*
      turns;  // [num_tiles, Hq], 0 when the engine starts: how often a tile's sums were added to
  bool only_shared;  // do nothing where no sequences have keys in common: another engine serves
  bool deterministic;

  __host__ __device__ int32_t LargerHeadSize() const {
    return head_size > v_head_size ? head_size : v_head_size;
  }
  __device__ KeyRange Visible(const Sequence& s, int first, int last) const {
    return VisibleKeys(s, window, first, last);
  }

  // The natural score from x, the dot product times softmax_scale, and what the gradient of the
  // score is multiplied by to get that of x. distance = i + len_k - len_q - j.
  __device__ float Score(float x, float slope, int64_t distance, float* derivative) const {
    *derivative = 1.f;
    if (softcap > 0.f) {
      const float t = tanhf(x / softcap);
      x = softcap * t;
      *derivative = 1.f - t * t;
    }
    if (slope != 0.f) x -= slope * fabsf(static_cast<float>(distance));
    return x;
  }

  // Where lse2 and delta have row `query` of a sequence.
  __device__ int64_t RowPlace(int sequence, int query, int head) const {
    return int64_t{head} * plan.num_rows() + int64_t{plan.row_tile_starts[sequence]} * kRowTile +
           query;
  }
};

__device__ inline float LoadElement(const Rows& rows, int dtype, int token, int head, int dim) {
  return attention::LoadFloat(
      rows.data, token * rows.stride_token + head * rows.stride_head + dim * rows.stride_dim,
      dtype);
}

__device__ inline void StoreElement(void* data, int64_t i, int dtype, float value) {
  if (dtype == FLASHXLA_F32) {
    static_cast<float*>(data)[i] = value;
  } else if (dtype == FLASHXLA_F16) {
    static_cast<__half*>(data)[i] = __float2half_rn(value);
  } else {
    static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(value);
  }
}

__device__ inline void StoreElement(const Rows& rows, int dtype, int token, int head, int dim,
                                    float value) {
  StoreElement(rows.data,
               token * rows.stride_token + head * rows.stride_head + dim * rows.stride_dim, dtype,
               value);
}

}  // namespace flashxla::attention_backward

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_PROBLEM_CUH_
