// Division by a number that is the same for a whole launch.
#ifndef FLASHXLA_CSRC_CUDA_FAST_DIVIDE_H_
#define FLASHXLA_CSRC_CUDA_FAST_DIVIDE_H_

#include <cuda_runtime.h>

#include <cstdint>

namespace flashxla {

// x / d as the high half of x * m: right for 0 <= x < 2^31, 0 < d < 2^31.
struct FastDivide {
  uint32_t divisor = 1, factor = 0, shift = 0;

  FastDivide() = default;
  explicit FastDivide(int64_t d) : divisor(static_cast<uint32_t>(d)) {
    int bits = 0;  // the smallest with 2^bits >= d
    while ((int64_t{1} << bits) < d) ++bits;
    if (bits == 0) return;
    // ceil(2^(31 + bits) / d) <= 2^32 - 1, and its error times 2^31 stays below one.
    factor = static_cast<uint32_t>(((uint64_t{1} << (31 + bits)) + d - 1) / d);
    shift = bits - 1;
  }

  __device__ uint32_t Quotient(uint32_t x) const {
    return divisor == 1 ? x : __umulhi(x, factor) >> shift;
  }
};

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CUDA_FAST_DIVIDE_H_
