// general: any head sizes, dtypes and strides, on CUDA cores: simple rather than fast. One kernel
// writes grad_q: a warp per query token and head goes over its keys. One writes grad_k and grad_v:
// a warp per row of k and KV head goes over the queries that see it.
#include <algorithm>
#include <type_traits>

#include "common/attention_arguments.h"
#include "cuda/attention_backward/engines.h"
#include "cuda/attention_backward/key_sequences.cuh"

namespace flashxla::attention_backward {
namespace {

using attention::kAllLanes;

constexpr int kLanes = 32;
constexpr int kWarps = 4;

// Lane l holds dims l, l + 32, ... of each row. kStep keys or queries are processed at a time,
// which hides latencies.
template <int kDims, int kValueDims, int kStepRows>
struct Sizes {
  static constexpr int kLaneDims = kDims / kLanes, kLaneValueDims = kValueDims / kLanes;
  static constexpr int kStep = kStepRows;
  static_assert(kDims % kLanes == 0 && kValueDims % kLanes == 0);
};
using SmallSizes = Sizes<128, 128, 4>;
using LargeSizes = Sizes<kMaxHeadSize, kMaxValueHeadSize, 2>;

// This lane's dims of a row; zeros past the head size, and if !exists.
template <int kDtype, int kDims>
__device__ void LoadRow(const Rows& rows, int64_t token, int head, int head_size, bool exists,
                        float (&row)[kDims]) {
  const int lane = threadIdx.x % kLanes;
  const int64_t offset = token * rows.stride_token + head * rows.stride_head;
#pragma unroll
  for (int i = 0; i < kDims; ++i) {
    const int d = i * kLanes + lane;
    row[i] = exists && d < head_size
                 ? attention::LoadFloat(rows.data, offset + d * rows.stride_dim, kDtype)
                 : 0.f;
  }
}

template <int kDims>
__device__ void StoreRow(const Rows& rows, int dtype, int token, int head, int head_size,
                         float factor, const float (&row)[kDims]) {
  const int lane = threadIdx.x % kLanes;
#pragma unroll
  for (int i = 0; i < kDims; ++i) {
    const int d = i * kLanes + lane;
    if (d < head_size) StoreElement(rows, dtype, token, head, d, row[i] * factor);
  }
}

// This lane's share of a dot product.
template <int kDims>
__device__ float Dot(const float (&a)[kDims], const float (&b)[kDims]) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kDims; ++i) sum = fmaf(a[i], b[i], sum);
  return sum;
}

template <int kDims>
__device__ void AddScaled(float (&sums)[kDims], float factor, const float (&row)[kDims]) {
#pragma unroll
  for (int i = 0; i < kDims; ++i) sums[i] = fmaf(factor, row[i], sums[i]);
}

// The lane that holds element n of kStep: the first of those that do.
template <int kStep>
__device__ int LaneOf(int n) {
  return n * (kLanes / kStep);
}

// Adds up each x[n] over the lanes. A lane gets the sum with n = lane / (32 / kStep).
template <int kStep>
__device__ float SumOfLanes(float (&x)[kStep]) {
  int lanes = kLanes / 2;
#pragma unroll
  for (int half = kStep / 2; half > 0; half /= 2, lanes /= 2) {
    const bool upper = threadIdx.x & lanes;
#pragma unroll
    for (int n = 0; n < half; ++n) {
      const float other = __shfl_xor_sync(kAllLanes, upper ? x[n] : x[n + half], lanes);
      x[n] = (upper ? x[n + half] : x[n]) + other;
    }
  }
  float sum = x[0];
  for (; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(kAllLanes, sum, lanes);
  return sum;
}

// A weight and the gradient of its score before softcap and ALiBi.
struct Weight {
  float value, grad;
};

__device__ Weight WeightOf(const Problem& p, float dot, float grad, float lse2, float delta,
                           float slope, int64_t distance) {
  float derivative;
  const float score = p.Score(dot * p.softmax_scale, slope, distance, &derivative);
  const float value = lse2 == INFINITY ? 0.f : exp2f(fmaf(score, kLog2e, -lse2));
  return {value, value * (grad - delta) * derivative};
}

template <int kDtype, typename S>
__device__ void GradQRow(const Problem& p, int token, int head) {
  constexpr int kStep = S::kStep;
  const int mark = p.plan.token_sequence[token];
  if (mark == attention::kNoSequence) return;
  const int index = attention::SequenceOfMark(mark), kv_head = head / p.group_size;
  const PlannedSequence s = p.plan.sequences[index];
  const int query = token - s.first_query;
  const int64_t diagonal = int64_t{query} + s.length - s.num_queries;
  const int64_t place = p.RowPlace(index, query, head);
  const float lse2 = p.lse2[place], delta = p.delta[place];
  const float slope = p.alibi_slopes.at(index, head, 0.f);
  const int lane_n = threadIdx.x % kLanes / (kLanes / kStep);
  float q[S::kLaneDims], grad_out[S::kLaneValueDims], grad_q[S::kLaneDims] = {};
  LoadRow<kDtype>(p.q, token, head, p.head_size, true, q);
  LoadRow<kDtype>(p.grad_out, token, head, p.v_head_size, true, grad_out);
  const KeyRange keys = p.Visible(s, query, query);
  for (int key = keys.begin; key < keys.end; key += kStep) {
    float k[kStep][S::kLaneDims], dots[kStep], grads[kStep];
#pragma unroll
    for (int n = 0; n < kStep; ++n) {
      const bool exists = key + n < keys.end;
      const int64_t row = int64_t{s.key_row} + key + n;
      float v[S::kLaneValueDims];
      LoadRow<kDtype>(p.k, row, kv_head, p.head_size, exists, k[n]);
      LoadRow<kDtype>(p.v, row, kv_head, p.v_head_size, exists, v);
      dots[n] = Dot(q, k[n]), grads[n] = Dot(grad_out, v);
    }
    const float dot = SumOfLanes(dots), grad = SumOfLanes(grads);
    Weight weight = WeightOf(p, dot, grad, lse2, delta, slope, diagonal - (key + lane_n));
    if (key + lane_n >= keys.end) weight = {};
#pragma unroll
    for (int n = 0; n < kStep; ++n) {
      AddScaled(grad_q, __shfl_sync(kAllLanes, weight.grad, LaneOf<kStep>(n)), k[n]);
    }
  }
  StoreRow(p.grad_q, kDtype, token, head, p.head_size, p.softmax_scale, grad_q);
}

template <int kDtype, typename S>
__device__ void GradKVRow(const Problem& p, int row, int kv_head) {
  constexpr int kStep = S::kStep;
  const int lane_n = threadIdx.x % kLanes / (kLanes / kStep);
  float k[S::kLaneDims], grad_k[S::kLaneDims] = {};
  float v[S::kLaneValueDims], grad_v[S::kLaneValueDims] = {};
  KeySequences sequences(row, 1);
  bool more = sequences.Next(p);
  LoadRow<kDtype>(p.k, row, kv_head, p.head_size, more, k);
  LoadRow<kDtype>(p.v, row, kv_head, p.v_head_size, more, v);
  for (; more; more = sequences.Next(p)) {
    const int index = sequences.index();
    const PlannedSequence s = p.plan.sequences[index];
    const QueryRange queries = sequences.Queries(p, s);
    const int64_t position = int64_t{row} - s.key_row - s.length + s.num_queries;
    for (int head = kv_head * p.group_size; head < (kv_head + 1) * p.group_size; ++head) {
      const float slope = p.alibi_slopes.at(index, head, 0.f);
      for (int query = queries.begin; query < queries.end; query += kStep) {
        float q[kStep][S::kLaneDims], grad_out[kStep][S::kLaneValueDims];
        float dots[kStep], grads[kStep];
#pragma unroll
        for (int n = 0; n < kStep; ++n) {
          const bool exists = query + n < queries.end;
          const int64_t token = int64_t{s.first_query} + query + n;
          LoadRow<kDtype>(p.q, token, head, p.head_size, exists, q[n]);
          LoadRow<kDtype>(p.grad_out, token, head, p.v_head_size, exists, grad_out[n]);
          dots[n] = Dot(q[n], k), grads[n] = Dot(grad_out[n], v);
        }
        const float dot = SumOfLanes(dots), grad = SumOfLanes(grads);
        Weight weight = {};
        if (query + lane_n < queries.end) {
          const int64_t place = p.RowPlace(index, query + lane_n, head);
          weight = WeightOf(p, dot, grad, p.lse2[place], p.delta[place], slope,
                            query + lane_n - position);
        }
#pragma unroll
        for (int n = 0; n < kStep; ++n) {
          const int lane = LaneOf<kStep>(n);
          AddScaled(grad_k, __shfl_sync(kAllLanes, weight.grad, lane), q[n]);
          AddScaled(grad_v, __shfl_sync(kAllLanes, weight.value, lane), grad_out[n]);
        }
      }
    }
  }
  StoreRow(p.grad_k, kDtype, row, kv_head, p.head_size, p.softmax_scale, grad_k);
  StoreRow(p.grad_v, kDtype, row, kv_head, p.v_head_size, 1.f, grad_v);
}

// Neighbouring warps take neighbouring tokens of one head, which mostly read the same rows.
template <int kDtype, typename S>
__global__ void __launch_bounds__(kWarps* kLanes) GradQKernel(const __grid_constant__ Problem p) {
  const int64_t rows = int64_t{p.num_tokens} * p.num_heads;
  for (int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / kLanes; i < rows;
       i += int64_t{gridDim.x} * kWarps) {
    // Backwards: the last rows of a sequence see the most keys and should start first.
    GradQRow<kDtype, S>(p, p.num_tokens - 1 - static_cast<int>(i % p.num_tokens),
                        static_cast<int>(i / p.num_tokens));
  }
}

template <int kDtype, typename S>
__global__ void __launch_bounds__(kWarps* kLanes) GradKVKernel(const __grid_constant__ Problem p) {
  const int64_t rows = int64_t{p.num_keys} * p.num_kv_heads;
  for (int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / kLanes; i < rows;
       i += int64_t{gridDim.x} * kWarps) {
    GradKVRow<kDtype, S>(p, static_cast<int>(i % p.num_keys), static_cast<int>(i / p.num_keys));
  }
}

void Launch(void (*kernel)(Problem), const Problem& p, int64_t rows, cudaStream_t stream) {
  if (rows == 0) return;
  const int64_t blocks = std::min<int64_t>((rows + kWarps - 1) / kWarps, INT32_MAX);
  kernel<<<static_cast<unsigned>(blocks), kWarps * kLanes, 0, stream>>>(p);
}

const char* WhyNotGeneral(const Problem&) { return ""; }

flashxla_status LaunchGeneral(const Problem& p, cudaStream_t stream) {
  auto launch = [&](auto dtype, auto sizes) {
    constexpr int kDtype = decltype(dtype)::value;
    using S = decltype(sizes);
    Launch(GradQKernel<kDtype, S>, p, int64_t{p.num_tokens} * p.num_heads, stream);
    Launch(GradKVKernel<kDtype, S>, p, int64_t{p.num_keys} * p.num_kv_heads, stream);
  };
  auto with_sizes = [&](auto dtype) {
    p.LargerHeadSize() <= 128 ? launch(dtype, SmallSizes()) : launch(dtype, LargeSizes());
  };
  switch (p.dtype) {
    case FLASHXLA_F32:
      with_sizes(std::integral_constant<int, FLASHXLA_F32>());
      break;
    case FLASHXLA_F16:
      with_sizes(std::integral_constant<int, FLASHXLA_F16>());
      break;
    default:
      with_sizes(std::integral_constant<int, FLASHXLA_BF16>());
  }
  return FLASHXLA_OK;
}

}  // namespace

const Engine kGeneralEngine = {
    "general", "CUDA cores, any head size", WhyNotGeneral, nullptr, nullptr, LaunchGeneral, true};

}  // namespace flashxla::attention_backward
