// From a call's dtypes and head size to the template instance that serves it.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_DISPATCH_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_DISPATCH_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "common/attention_arguments.h"
#include "common/tensor_view.h"
#include "cuda/attention/problem.cuh"
#include "flashxla/common.h"

namespace flashxla::attention {

template <typename T>
struct Type {
  using type = T;
};

// The largest head size of most engines.
constexpr int kMaxUsualHeadSize = 256;

// Whether head sizes are above those of most engines.
inline bool HasLargeHeads(const Problem& p) { return p.LargerHeadSize() > kMaxUsualHeadSize; }

// The head sizes that have an instance, in ascending order.
template <int... kSizes>
struct HeadSizes {
  // That of the instance that serves a head size; the last one for all above it.
  static constexpr int Bucket(int64_t head_size) {
    int bucket = 0;
    ((bucket = bucket == 0 || bucket < head_size ? kSizes : bucket), ...);
    return bucket;
  }
  // Calls body(integral_constant<int, kDims>).
  template <typename Body>
  static void With(int64_t head_size, Body&& body) {
    const int bucket = Bucket(head_size);
    ((bucket == kSizes ? body(std::integral_constant<int, kSizes>{}) : void()), ...);
  }
};

using UsualHeadSizes = HeadSizes<64, 128, kMaxUsualHeadSize>;
// Of the engine for few queries where threads copy the keys.
using CopiedHeadSizes = HeadSizes<128, kMaxUsualHeadSize, static_cast<int>(kMaxHeadSize)>;
// Of partial results: also of larger heads, up to the largest of values.
using CombinedHeadSizes = HeadSizes<64, 128, kMaxUsualHeadSize, 512>;
// Of the engines for prompts and training on Hopper, whose time goes with the head size.
using WideHeadSizes = HeadSizes<64, 128, 192, kMaxUsualHeadSize>;

// Columns of values in such an instance, where queries and keys have `dims`. Fewer have one in the
// one case that is common: head sizes of 192 and 128.
constexpr int WideValueDims(int dims, int v_head_size) {
  return dims == 192 && v_head_size <= 128 ? 128 : dims;
}

// Calls body(Type<T>, integral_constant<int, kDims>, bool_constant<kFp8>). T is the dtype of 16-bit
// outputs, kDims the head size's bucket.
template <typename Sizes = UsualHeadSizes, typename Body>
void WithInstance(int64_t out_dtype, int64_t head_size, bool fp8, Body&& body) {
  auto with_keys = [&](auto t) {
    Sizes::With(head_size, [&](auto dims) {
      fp8 ? body(t, dims, std::true_type{}) : body(t, dims, std::false_type{});
    });
  };
  out_dtype == FLASHXLA_F16 ? with_keys(Type<__half>{}) : with_keys(Type<__nv_bfloat16>{});
}

// That of a call.
template <typename Sizes = UsualHeadSizes, typename Body>
void WithInstance(const Problem& p, Body&& body) {
  WithInstance<Sizes>(p.out_dtype, p.LargerHeadSize(), IsFp8(p.kv_dtype), body);
}

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_DISPATCH_CUH_
