// What the threads of a warp do together.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_WARP_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_WARP_CUH_

#include <cstdint>

namespace flashxla::attention {

constexpr unsigned kAllLanes = 0xffffffffu;

// The last s in [0, n) with starts[s] <= x: the list that item x belongs to. Requires starts[0] <=
// x < starts[n]. All lanes of a warp must call it: they search together, because the dependent
// loads of a binary search would be slow.
__device__ inline int FindStart(const int32_t* starts, int n, int x) {
  const int lane = threadIdx.x & 31;
  int low = 0;
  for (int step = (n + 31) / 32;; step = (step + 31) / 32) {
    const int i = low + lane * step;
    const unsigned before = __ballot_sync(kAllLanes, i < n && starts[i] <= x);
    low += (31 - __clz(before)) * step;
    if (step == 1) return low;
  }
}

// Lane i of four has element i of four vectors; afterwards it has vector i.
__device__ inline void Transpose4(uint32_t (&x)[4]) {
  const int lane = threadIdx.x & 3;
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool high = lane & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      uint32_t &a = x[i], &b = x[i + step];
      const uint32_t other = __shfl_xor_sync(kAllLanes, high ? a : b, step);
      (high ? a : b) = other;
    }
  }
}

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_WARP_CUH_
