// What a thread block that makes a plan does with its threads together: prefix sums, sorting.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_SCAN_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_SCAN_CUH_

#include <cstdint>

#include "cuda/attention/warp.cuh"

namespace flashxla::attention {

constexpr int kScanThreads = 1024;  // at most
constexpr int kScanWarps = kScanThreads / 32;

// Two of each: a scan may write one while slow threads still read the last scan's results from the
// other.
struct ScanMemory {
  int32_t partial[2][kScanWarps];
  unsigned flags[2][kScanWarps];
};

// Prefix sums over the threads of the block, all of which must call it.
struct Scan {
  ScanMemory& shared;
  int turn = 0;

  // Returns the sum of `value` over the threads before this one. *total is the sum over all
  // threads, *any whether any thread has set `flag`.
  __device__ int Exclusive(int value, int* total, bool flag = false, bool* any = nullptr) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    int32_t* partial = shared.partial[turn];
    unsigned* flags = shared.flags[turn];
    turn ^= 1;
    const int sum = InclusiveSum(value);
    if (lane == 31) partial[warp] = sum;
    const unsigned flagged = any == nullptr ? 0 : __ballot_sync(kAllLanes, flag);
    if (any != nullptr && lane == 0) flags[warp] = flagged;
    __syncthreads();
    if (warp == 0) {
      partial[lane] = InclusiveSum(lane < warps ? partial[lane] : 0);
      if (any != nullptr) flags[lane] = __any_sync(kAllLanes, lane < warps && flags[lane] != 0);
    }
    __syncthreads();
    *total = partial[warps - 1];
    if (any != nullptr) *any = flags[0] != 0;
    return sum - value + (warp == 0 ? 0 : partial[warp - 1]);
  }
};

// More tiles than this are not sorted by cost: so many balance anyway.
constexpr int kTileBits = 11, kMaxSorted = 1 << kTileBits;

// A number by which tile k of less than kMaxSorted is sorted: the most expensive first, and of
// those that cost the same the first.
__device__ inline uint32_t CostKey(int cost, int k) {
  constexpr int kMostCost = (1 << (32 - kTileBits)) - 1;  // more differs no more
  return static_cast<uint32_t>(min(cost, kMostCost)) << kTileBits | (kMaxSorted - 1 - k);
}
__device__ inline int CostOfKey(uint32_t key) { return static_cast<int>(key >> kTileBits); }
__device__ inline int TileOfKey(uint32_t key) {
  return kMaxSorted - 1 - static_cast<int>(key & (kMaxSorted - 1));
}

// How many of `count` keys are larger than `own`. They lie at a multiple of 16 bytes, and zeros
// fill up the last four.
__device__ inline int RankByKey(const uint32_t* keys, int count, uint32_t own) {
  int rank = 0;
#pragma unroll 2
  for (int j = 0; j < count; j += 4) {
    const uint4 x = *reinterpret_cast<const uint4*>(keys + j);
    rank += (x.x > own) + (x.y > own) + (x.z > own) + (x.w > own);
  }
  return rank;
}

// Sorts `count` keys, the largest first (bitonic sort). There must be room for the next power of
// two. All threads of the block must call it, after they wrote the keys.
__device__ inline void SortKeys(uint32_t* keys, int count) {
  int size = 1;
  while (size < count) size *= 2;
#pragma unroll 1
  for (int n = count + threadIdx.x; n < size; n += blockDim.x) keys[n] = 0;
  __syncthreads();
#pragma unroll 1
  for (int run = 2; run <= size; run *= 2) {
#pragma unroll 1
    for (int step = run / 2; step > 0; step /= 2) {
#pragma unroll 1
      for (int n = threadIdx.x; n < size / 2; n += blockDim.x) {
        const int low = 2 * n - (n & (step - 1)), high = low + step;
        const uint32_t x = keys[low], y = keys[high];
        if ((x < y) == ((low & run) == 0)) keys[low] = y, keys[high] = x;
      }
      __syncthreads();
    }
  }
}

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_SCAN_CUH_
