// Reading elements of any query or key dtype.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_DTYPES_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_DTYPES_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "cuda/attention/mma.cuh"
#include "flashxla/common.h"

namespace flashxla::attention {

// Converts two fp8 numbers, low byte first; exact.
__device__ inline float2 DecodeFp8x2(uint16_t bits, bool e5m2) {
  const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(bits, e5m2 ? __NV_E5M2 : __NV_E4M3);
  return __half22float2(__half2(raw));
}

// Converts four fp8 numbers to two pairs of halves; exact.
template <bool kE5m2>
__device__ inline void WidenFp8x4(uint32_t bytes, uint32_t* low, uint32_t* high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  if constexpr (kE5m2) {
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e5m2x2 %0, a; "
        "cvt.rn.f16x2.e5m2x2 %1, b;}"
        : "=r"(*low), "=r"(*high)
        : "r"(bytes));
  } else {
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; "
        "cvt.rn.f16x2.e4m3x2 %1, b;}"
        : "=r"(*low), "=r"(*high)
        : "r"(bytes));
  }
#else
  auto widen = [](uint16_t bits) {
    const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(bits, kE5m2 ? __NV_E5M2 : __NV_E4M3);
    return raw.x | static_cast<uint32_t>(raw.y) << 16;
  };
  *low = widen(bytes & 0xffff), *high = widen(bytes >> 16);
#endif
}

// Two pairs of T from four fp8 numbers; exact.
template <typename T, bool kE5m2>
__device__ inline void WidenTo(uint32_t bytes, uint32_t* low, uint32_t* high) {
  WidenFp8x4<kE5m2>(bytes, low, high);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    for (uint32_t* pair : {low, high}) {
      const float2 x = __half22float2(reinterpret_cast<const __half2&>(*pair));
      *pair = Pack<T>(x.x, x.y);
    }
  }
}

__device__ inline float DecodeFp8(uint8_t bits, bool e5m2) { return DecodeFp8x2(bits, e5m2).x; }

__device__ inline float LoadFloat(const char* data, int64_t i, int dtype) {
  switch (dtype) {
    case FLASHXLA_F32:
      return reinterpret_cast<const float*>(data)[i];
    case FLASHXLA_F16:
      return __half2float(reinterpret_cast<const __half*>(data)[i]);
    case FLASHXLA_BF16:
      return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(data)[i]);
    default:
      return DecodeFp8(reinterpret_cast<const uint8_t*>(data)[i], dtype == FLASHXLA_F8E5M2);
  }
}

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_DTYPES_CUH_
