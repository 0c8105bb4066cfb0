// From a call's dtypes and head size to the template instance that serves it.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_DISPATCH_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_DISPATCH_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "flashxla/common.h"

namespace flashxla::attention {

template <typename T>
struct Type {
  using type = T;
};

// The largest head size of every engine but the general one.
constexpr int kMaxUsualHeadSize = 256;

// The head size of the instance that serves a head size.
inline int DimsBucket(int64_t head_size) {
  return head_size <= 64 ? 64 : head_size <= 128 ? 128 : kMaxUsualHeadSize;
}

// Calls body(Type<T>, integral_constant<int, kDims>, bool_constant<kFp8>). T is the dtype of 16-bit
// outputs, kDims the head size's DimsBucket.
template <typename Body>
void WithInstance(int64_t out_dtype, int64_t head_size, bool fp8, Body&& body) {
  auto with_dims = [&](auto t, auto is_fp8) {
    switch (DimsBucket(head_size)) {
      case 64:
        return body(t, std::integral_constant<int, 64>{}, is_fp8);
      case 128:
        return body(t, std::integral_constant<int, 128>{}, is_fp8);
      default:
        return body(t, std::integral_constant<int, kMaxUsualHeadSize>{}, is_fp8);
    }
  };
  auto with_keys = [&](auto t) {
    fp8 ? with_dims(t, std::true_type{}) : with_dims(t, std::false_type{});
  };
  out_dtype == FLASHXLA_F16 ? with_keys(Type<__half>{}) : with_keys(Type<__nv_bfloat16>{});
}

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_DISPATCH_CUH_
