// Fast division by a number that is fixed for a whole launch.
#ifndef FLASHXLA_CSRC_CUDA_FAST_DIVIDE_H_
#define FLASHXLA_CSRC_CUDA_FAST_DIVIDE_H_

#include <cuda_runtime.h>

#include <cstdint>

namespace flashxla {

// Computes x / d from the high half of x * factor. Exact for 0 <= x < 2^31 and 0 < d < 2^31.
struct FastDivide {
  uint32_t divisor = 1, factor = 0, shift = 0;

  FastDivide() = default;
  explicit FastDivide(int64_t d) : divisor(static_cast<uint32_t>(d)) {
    int bits = 0;  // becomes the smallest with 2^bits >= d
    while ((int64_t{1} << bits) < d) ++bits;
    if (bits == 0) return;
    // ceil(2^(31 + bits) / d) <= 2^32 - 1. Rounding it up changes no quotient, since x < 2^31.
    factor = static_cast<uint32_t>(((uint64_t{1} << (31 + bits)) + d - 1) / d);
    shift = bits - 1;
  }

  __device__ uint32_t Quotient(uint32_t x) const {
    return divisor == 1 ? x : __umulhi(x, factor) >> shift;
  }
};

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CUDA_FAST_DIVIDE_H_
