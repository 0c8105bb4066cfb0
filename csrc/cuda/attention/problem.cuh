// One attention call as the kernels see it, and what every engine computes in the same way: where a
// key lies, how a dot product becomes a score, how a row ends.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_PROBLEM_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_PROBLEM_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/math_constants.h"
#include "common/sequences.h"
#include "common/visibility.h"
#include "cuda/attention/plan.cuh"
#include "cuda/fast_divide.h"
#include "flashxla/attention.h"

namespace flashxla::attention {

// Rows [T, Hq, D]; strides in elements.
struct Rows {
  char* data;
  int64_t stride_token, stride_head, stride_dim;
};

// Keys or values as [block, token, head, dim]; strides in elements. Dense: one block.
struct Cache {
  const char* data;
  int64_t stride_block, stride_token, stride_head, stride_dim;
  int32_t head_size;
};

// f32 [S, H], broadcast with zero strides. An absent one reads as `none`.
struct PerHead {
  const float* data;
  int64_t stride_sequence, stride_head;

  __device__ float at(int sequence, int head, float none) const {
    return data ? data[sequence * stride_sequence + head * stride_head] : none;
  }
};

// What the scores of a row are relative to: not -inf, where it has seen no key.
__device__ inline float SoftmaxBase(float row_max) { return row_max == -INFINITY ? 0.f : row_max; }

// The end of a row's softmax.
struct RowEnd {
  float row_max;  // in log2
  float row_sum;  // of 2^(score - row_max)
  float sink;     // natural; -inf: none

  // Normalizes the sum of weighted values.
  __device__ float Factor() const {
    if (row_sum == 0.f) return 0.f;
    const float total = sink == -INFINITY ? row_sum : row_sum + exp2f(sink * kLog2e - row_max);
    return __fdividef(1.f, total);  // a total of 2^126 or more gives 0
  }
  // The natural LSE.
  __device__ float Lse() const {
    if (row_sum == 0.f) return sink;
    if (sink == -INFINITY) return row_sum > 0.f ? (row_max + log2f(row_sum)) * kLn2 : NAN;
    const float total = row_sum + exp2f(sink * kLog2e - row_max);
    return isinf(total) ? sink + log1pf(exp2f(row_max - sink * kLog2e) * row_sum)
                        : (row_max + log2f(total)) * kLn2;
  }
};

// The token, the query head and the KV head of a row.
struct RowPlace {
  int token, head, kv_head;
};

struct Problem {
  Rows q, out;
  int64_t q_bytes;  // from the first element to the last; 0 if some lie before the first
  float* lse;       // may be null
  int64_t lse_stride_head, lse_stride_token;
  Cache k, v;              // queries have k's head size, outputs v's
  BlockTable block_table;  // null data: dense
  Window window;
  int32_t num_tokens, num_heads, num_kv_heads, group_size;
  int64_t max_queries;  // per sequence, if the caller is right
  FastDivide by_group_size;
  int32_t block_shift;  // log2 of the block size if that is a power of two, else -1
  FewShape few;
  int32_t q_dtype, kv_dtype, out_dtype, sink_dtype;  // flashxla_dtype
  // The most bytes of keys and values that strides, addresses and head sizes allow to access at a
  // time: 16, 8 or 4; 0 if single elements have to be loaded.
  int32_t kv_unit;
  int32_t q_unit, out_unit;  // the same of queries and outputs
  // Whether they allow 4-byte loads of 16-bit queries, and 4-byte stores of 16-bit and 16-byte
  // stores of float32 outputs.
  bool q_pairs, out_pairs, out_vectors;
  bool kv_near;  // offsets in a cache, in units of kv_unit, fit 32 bits
  bool batch_invariant;
  float softmax_scale, softcap;
  PerHead q_descale, k_descale, v_descale, alibi_slopes;
  const void* sinks;  // [Hq], may be null
  int64_t sinks_stride;
  PlanView plan;
  // The engines make the plan themselves, from what follows, and `plan` is not there: see
  // own_plan.cuh.
  bool makes_plan;
  IndexTensors index;
  RoleRules roles;
  // few: the engine starts while the one for many queries, launched before, still runs.
  bool few_follows;
  // Where that one says whether this one has anything to do; null if it does not.
  int32_t* few_left;
  // general: sequences whose entry here is not negative have been served; null: none has.
  const int32_t* served;

  __host__ __device__ bool kv_vectors() const { return kv_unit == 16; }
  // The head size that decides which instance serves a call.
  __host__ __device__ int32_t LargerHeadSize() const {
    return k.head_size > v.head_size ? k.head_size : v.head_size;
  }
  // Whether dims of keys, or of values, are missing in an instance for heads of `dims`.
  __device__ bool LacksDims(int dims) const { return k.head_size < dims || v.head_size < dims; }

  // The keys that at least one of queries [first, last] of a sequence sees.
  __device__ KeyRange Visible(const Sequence& s, int first, int last) const {
    return VisibleKeys(s, window, first, last);
  }
  __device__ KeyRange Visible(const Sequence& s, int i) const { return Visible(s, i, i); }

  // The page that key j lies in.
  __device__ int PageOf(int j) const {
    return block_shift >= 0 ? j >> block_shift : j / block_table.block_size;
  }

  // Finds key j of sequence `index`: its block, and its token in the block. False if its table
  // entry is unsound: the key is skipped. j must be in [0, num_keys).
  __device__ bool Locate(const Sequence& s, int index, int j, int* block, int* token) const {
    if (block_table.data == nullptr) {
      *block = 0, *token = s.key_row + j;
      return true;
    }
    const int page = j / block_table.block_size;
    *token = j - page * block_table.block_size;
    *block = Entry(block_table, index, page);
    return IsSound(block_table, *block);
  }

  // Where row `row` belongs of those that a thread block for few queries has of KV head kv_head, or
  // of a pair: then kv_head counts pairs, and the place has the row's own KV head.
  __device__ RowPlace PlaceOf(int first_query, int kv_head, int row) const {
    const int query = by_group_size.Quotient(row), of_group = row - query * group_size;
    const bool second = few.heads_together > 1 && 2 * of_group >= group_size;
    return {first_query + query, kv_head * group_size + of_group,
            kv_head * few.heads_together + (second ? 1 : 0)};
  }

  // What the dot products are multiplied by, before the softcap.
  __device__ float ScoreScale(int sequence, int kv_head) const {
    return softmax_scale * q_descale.at(sequence, kv_head, 1.f) *
           k_descale.at(sequence, kv_head, 1.f);
  }

  __device__ float ValueScale(int sequence, int kv_head) const {
    return v_descale.at(sequence, kv_head, 1.f);
  }

  // The natural score from x, the dot product times ScoreScale. distance = i + len_k - len_q - j.
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

  __device__ void StoreLse(int token, int head, const RowEnd& end) const {
    if (lse != nullptr) StoreLse(token, head, end.Lse());
  }

  // Stores a single output element.
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

  // Stores four neighbouring output elements, as far as they are within the head size.
  __device__ void StoreOutFour(int token, int head, int dim, const float (&x)[4]) const {
    if (out_vectors) {
      const int64_t i = token * out.stride_token + head * out.stride_head + dim;
      if (dim < v.head_size) {
        *reinterpret_cast<float4*>(out.data + 4 * i) = make_float4(x[0], x[1], x[2], x[3]);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (dim + i < v.head_size) StoreOut(token, head, dim + i, x[i]);
    }
  }

  // Stores two neighbouring elements of a 16-bit output. Needs out_pairs.
  __device__ void StoreOutPair(int token, int head, int dim, const float (&pair)[2]) const {
    const int64_t i = token * out.stride_token + head * out.stride_head + dim;
    void* to = out.data + 2 * i;
    if (out_dtype == FLASHXLA_F16) {
      *static_cast<__half2*>(to) = __floats2half2_rn(pair[0], pair[1]);
    } else {
      *static_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(pair[0], pair[1]);
    }
  }
};

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_PROBLEM_CUH_
