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

// The sum of x over all lanes of a warp, which must call it.
__device__ inline float SumOfWarp(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

// The largest x of all lanes of a warp, which must call it.
__device__ inline float MaxOfWarp(float x) {
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

// The sum, or the largest, of x over lanes 4 n to 4 n + 3, which share a row of the results of a
// matrix instruction. All lanes of a warp must call it.
__device__ inline float SumOfRow(float x) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}
__device__ inline float MaxOfRow(float x) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

// The sum of x over the lanes up to this one. All lanes of a warp must call it.
__device__ inline int InclusiveSum(int x) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(kAllLanes, x, step);
    if (lane >= step) x += other;
  }
  return x;
}

// What all lanes of a warp need: a lane reads a word of it, which can be done ahead, and then gets
// the words of all. The compiler knows then that the lanes have the same, and keeps what follows
// from it, as the addresses of matrix instructions do, in uniform registers.
template <typename T>
struct Together {
  static constexpr int kWords = sizeof(T) / 4;
  static_assert(kWords <= 32);
  int word;

  __device__ explicit Together(const T* from) {
    const int lane = threadIdx.x & 31;
    word = lane < kWords ? reinterpret_cast<const int*>(from)[lane] : 0;
  }
  __device__ T Get() const {
    T x;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      reinterpret_cast<int*>(&x)[i] = __shfl_sync(kAllLanes, word, i);
    }
    return x;
  }
};
// x of the first lane, for all lanes: the compiler does not know that they have the same already.
// What follows from x can be in uniform registers then. Matrix instructions take their operands'
// descriptors from these, so that stages and counts of loops around them are best found from such.
template <typename T>
__device__ T FromFirstLane(T x) {
#pragma unroll
  for (int i = 0; i < int{sizeof(T) / 4}; ++i) {
    int& word = reinterpret_cast<int*>(&x)[i];
    word = __shfl_sync(kAllLanes, word, 0);
  }
  return x;
}
template <typename T>
__device__ T ReadTogether(const T* from) {
  return Together<T>(from).Get();
}

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_WARP_CUH_
