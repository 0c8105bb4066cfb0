// float32 to fp8, with the same bits as the CPU's conversion (cpu/dtypes.h). Rounds to nearest
// even; infinity and numbers out of range become the largest finite number; NaN keeps its sign.
#ifndef FLASHXLA_CSRC_CUDA_FP8_ENCODE_CUH_
#define FLASHXLA_CSRC_CUDA_FP8_ENCODE_CUH_

#include <cuda_fp8.h>

#include <cstdint>

namespace flashxla {

// Encodes x / scale in the low byte and y / scale in the high byte.
template <__nv_fp8_interpretation_t kFormat>
__device__ inline uint32_t EncodeFp8x2(float x, float y, float scale) {
  constexpr uint32_t kNaN = kFormat == __NV_E4M3 ? 0x7f : 0x7e;
  const float a = x / scale, b = y / scale;
  uint32_t bits = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, kFormat);
  // The hardware encodes NaN differently, and the division drops its sign.
  if (a != a) bits = (bits & 0xff00) | kNaN | ((__float_as_uint(x) >> 24) & 0x80);
  if (b != b) bits = (bits & 0x00ff) | kNaN << 8 | ((__float_as_uint(y) >> 16) & 0x8000);
  return bits;
}

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CUDA_FP8_ENCODE_CUH_
