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

// Reads what all lanes of the warp need. The compiler then knows that they have the same, and keeps
// what follows from it, as the addresses of matrix instructions do, in uniform registers.
template <typename T>
__device__ T ReadTogether(const T* from) {
  constexpr int kWords = sizeof(T) / 4;
  static_assert(kWords <= 32);
  const int lane = threadIdx.x & 31;
  const int word = lane < kWords ? reinterpret_cast<const int*>(from)[lane] : 0;
  T x;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    reinterpret_cast<int*>(&x)[i] = __shfl_sync(kAllLanes, word, i);
  }
  return x;
}

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_WARP_CUH_
