// One attention call as the kernels see it, and what every engine computes alike: which keys a row
// sees, where a key lies, how a dot product becomes a score.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_PROBLEM_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_PROBLEM_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/attention/plan.cuh"
#include "flashxla/attention.h"

namespace flashxla::attention {

constexpr int kMaxHeadSize = 256;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Rows [T, Hq, D]; strides in elements.
struct Rows {
  char* data;
  int64_t stride_token, stride_head, stride_dim;
};

// Keys or values as [block, token, head, dim]; strides in elements. Dense: one block.
struct Cache {
  const char* data;
  int64_t stride_block, stride_token, stride_head, stride_dim;
};

// f32 [S, H] with broadcasting through zero strides; absent reads as `none`.
struct PerHead {
  const float* data;
  int64_t stride_sequence, stride_head;

  __device__ float at(int sequence, int head, float none) const {
    return data ? data[sequence * stride_sequence + head * stride_head] : none;
  }
};

struct Problem {
  Rows q, out;
  float* lse;  // may be null
  int64_t lse_stride_head, lse_stride_token;
  Cache k, v;
  const int32_t* block_table;  // null: dense
  int64_t table_stride_sequence, table_stride_page;
  int32_t num_tokens, num_heads, num_kv_heads, group_size, head_size;
  int32_t num_blocks, block_size;
  int32_t block_shift;                // log2 of a block size that is a power of two, else -1
  int32_t window_left, window_right;  // < 0: unlimited; causal makes window_right 0
  int32_t q_dtype, kv_dtype, out_dtype, sink_dtype;  // flashxla_dtype
  // What strides and addresses allow: 16-byte loads of keys and values, 4-byte ones of 16-bit
  // queries, 4-byte stores of 16-bit outputs.
  bool kv_vectors, q_pairs, out_pairs;
  bool kv_near;  // a cache's vectors of 16 bytes can be counted in 32 bits
  float softmax_scale, softcap;
  PerHead q_descale, k_descale, v_descale, alibi_slopes;
  const void* sinks;  // [Hq], may be null
  int64_t sinks_stride;
  PlanView plan;

  // Keys [*begin, *end) are those that query i of a sequence sees; none if *end <= *begin. Both
  // grow with i.
  __device__ void Visible(const Sequence& s, int i, int* begin, int* end) const {
    const int64_t diagonal = int64_t{i} + s.length - s.num_queries;
    int64_t first = s.first_key, last = s.num_keys;
    if (window_left >= 0 && diagonal - window_left > first) first = diagonal - window_left;
    if (window_right >= 0 && diagonal + window_right + 1 < last) last = diagonal + window_right + 1;
    *begin = static_cast<int>(first < s.num_keys ? first : s.num_keys);
    *end = static_cast<int>(last > 0 ? last : 0);
  }

  // Where key j of sequence `index` lies: *block and *token in it. False if its table entry is
  // unsound; the key is skipped then. j must be in [0, num_keys).
  __device__ bool Locate(const Sequence& s, int index, int j, int* block, int* token) const {
    if (block_table == nullptr) {
      *block = 0, *token = s.key_row + j;
      return true;
    }
    const int page = j / block_size;
    *token = j - page * block_size;
    *block = block_table[index * table_stride_sequence + page * table_stride_page];
    return *block >= 0 && *block < num_blocks;
  }

  // Factor of the dot products, before the softcap.
  __device__ float ScoreScale(int sequence, int kv_head) const {
    return softmax_scale * q_descale.at(sequence, kv_head, 1.f) *
           k_descale.at(sequence, kv_head, 1.f);
  }

  __device__ float ValueScale(int sequence, int kv_head) const {
    return v_descale.at(sequence, kv_head, 1.f);
  }

  // The score of a dot product times ScoreScale; distance = i + len_k - len_q - j.
  __device__ float Score(float x, float slope, int64_t distance) const {
    if (softcap > 0.f) x = softcap * tanhf(x / softcap);
    if (slope != 0.f) x -= slope * fabsf(static_cast<float>(distance));
    return x;
  }

  __device__ float Sink(int head) const {
    if (sinks == nullptr) return -INFINITY;
    const int64_t i = head * sinks_stride;
    if (sink_dtype == FLASHXLA_F32) return static_cast<const float*>(sinks)[i];
    if (sink_dtype == FLASHXLA_F16) return __half2float(static_cast<const __half*>(sinks)[i]);
    return __bfloat162float(static_cast<const __nv_bfloat16*>(sinks)[i]);
  }

  __device__ void StoreLse(int token, int head, float value) const {
    if (lse != nullptr) lse[head * lse_stride_head + token * lse_stride_token] = value;
  }

  // An output element that is no part of a vectorised store.
  __device__ void StoreOut(int token, int head, int dim, float value) const {
    const int64_t i = token * out.stride_token + head * out.stride_head + dim * out.stride_dim;
    if (out_dtype == FLASHXLA_F32) {
      reinterpret_cast<float*>(out.data)[i] = value;
    } else if (out_dtype == FLASHXLA_F16) {
      reinterpret_cast<__half*>(out.data)[i] = __float2half_rn(value);
    } else {
      reinterpret_cast<__nv_bfloat16*>(out.data)[i] = __float2bfloat16_rn(value);
    }
  }
};

// From a row's largest score (log2), the sum of 2^(score - top), and its sink: the factor that
// makes the weighted values an output, and the natural LSE.
__device__ inline float2 FinishRow(float top, float sum, float sink) {
  float lse = sum > 0.f ? (top + log2f(sum)) * kLn2 : sum == 0.f ? -INFINITY : NAN;
  float factor = sum == 0.f ? 0.f : 1.f / sum;
  if (sink != -INFINITY) {
    const float sink2 = sink * kLog2e;
    if (sum == 0.f) return make_float2(0.f, sink);
    const float total = sum + exp2f(sink2 - top);
    factor = 1.f / total;
    lse = isinf(total) ? sink + log1pf(exp2f(top - sink2) * sum) : (top + log2f(total)) * kLn2;
  }
  return make_float2(factor, lse);
}

// The last s in [0, n) with starts[s] <= x: whose list x is in. starts[0] <= x < starts[n]. All
// lanes of a warp search together, for the loads of a search one by one wait on each other.
__device__ inline int FindStart(const int32_t* starts, int n, int x) {
  const int lane = threadIdx.x & 31;
  int low = 0;
  for (int step = (n + 31) / 32;; step = (step + 31) / 32) {
    const int i = low + lane * step;
    const unsigned before = __ballot_sync(0xffffffffu, i < n && starts[i] <= x);
    low += (31 - __clz(before)) * step;
    if (step == 1) return low;
  }
}

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_PROBLEM_CUH_
