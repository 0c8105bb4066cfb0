// Dtypes, and the views through which every platform reads tensors.
#ifndef FLASHXLA_CSRC_COMMON_TENSOR_VIEW_H_
#define FLASHXLA_CSRC_COMMON_TENSOR_VIEW_H_

#include <cstdint>
#include <initializer_list>

#include "flashxla/common.h"

namespace flashxla {

// Keys or values as [block, token in block, head, dim]; strides in elements. Dense keys are a
// single block: num_blocks == 1, block_size == num_tokens.
struct CacheView {
  char* data = nullptr;
  int64_t num_blocks = 0, block_size = 0, num_heads = 0, head_size = 0;
  int64_t stride_block = 0, stride_token = 0, stride_head = 0, stride_dim = 0;
};

inline bool IsFp8(int64_t dtype) { return dtype == FLASHXLA_F8E4M3 || dtype == FLASHXLA_F8E5M2; }
inline bool IsFloat(int64_t dtype) { return dtype >= FLASHXLA_F32 && dtype <= FLASHXLA_F8E5M2; }

inline int64_t ElementSize(int64_t dtype) {
  switch (dtype) {
    case FLASHXLA_F32:
    case FLASHXLA_I32:
      return 4;
    case FLASHXLA_F16:
    case FLASHXLA_BF16:
      return 2;
    case FLASHXLA_I64:
      return 8;
    default:
      return 1;
  }
}

// The most bytes, up to 16, that can be accessed at a time where an address and the steps from it
// are such numbers of bytes: a power of two that divides them all.
inline int64_t CommonUnit(std::initializer_list<int64_t> bytes) {
  int64_t bits = 16;
  for (const int64_t each : bytes) bits |= each;
  return bits & -bits;
}
inline int64_t AddressOf(const void* data) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(data));
}

// What each cache layout means. `second` is the value cache of the two-tensor layouts.
inline void ViewCache(const flashxla_tensor& first, const flashxla_tensor& second, int64_t layout,
                      CacheView* k, CacheView* v) {
  auto view = [](const flashxla_tensor& t, int block, int token, int head, int dim) {
    CacheView c;
    c.data = static_cast<char*>(t.data);
    c.num_blocks = t.shape[block], c.stride_block = t.stride[block];
    c.block_size = t.shape[token], c.stride_token = t.stride[token];
    c.num_heads = t.shape[head], c.stride_head = t.stride[head];
    c.head_size = t.shape[dim], c.stride_dim = t.stride[dim];
    return c;
  };
  const int64_t size = ElementSize(first.dtype);
  switch (layout) {
    case FLASHXLA_NHD:
      *k = view(first, 0, 1, 2, 3), *v = view(second, 0, 1, 2, 3);
      break;
    case FLASHXLA_HND:
      *k = view(first, 0, 2, 1, 3), *v = view(second, 0, 2, 1, 3);
      break;
    case FLASHXLA_INTERLEAVED:
      *k = view(first, 0, 1, 2, 3);
      k->num_heads /= 2;
      *v = *k;
      v->data += k->stride_head * size;
      k->stride_head *= 2, v->stride_head *= 2;
      break;
    case FLASHXLA_PACKED_HND:
    case FLASHXLA_PACKED_NHD:
      *k = layout == FLASHXLA_PACKED_HND ? view(first, 0, 2, 1, 3) : view(first, 0, 1, 2, 3);
      k->head_size /= 2;
      *v = *k;
      v->data += k->head_size * k->stride_dim * size;
      break;
    case FLASHXLA_STACKED:
      *k = view(first, 1, 2, 3, 4);
      *v = *k;
      v->data += first.stride[0] * size;
      break;
  }
}

// A per-head scale: [1], [Hk] or [S, Hk], broadcast with zero strides. An absent one reads as 1.
struct ScaleView {
  const float* data = nullptr;
  int64_t stride_seq = 0, stride_head = 0;

  explicit ScaleView(const flashxla_tensor& t) : data(static_cast<const float*>(t.data)) {
    if (data == nullptr || t.rank == 0) return;
    const int64_t last = t.rank - 1;
    if (t.shape[last] > 1) stride_head = t.stride[last];
    if (t.rank == 2) stride_seq = t.stride[0];
  }
  float at(int64_t seq, int64_t head) const {
    return data ? data[seq * stride_seq + head * stride_head] : 1.0f;
  }
};

// Of an LSE, float32 [Hq, T].
inline float& LseAt(const flashxla_tensor& lse, int64_t token, int64_t head) {
  return static_cast<float*>(lse.data)[head * lse.stride[0] + token * lse.stride[1]];
}

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_COMMON_TENSOR_VIEW_H_
