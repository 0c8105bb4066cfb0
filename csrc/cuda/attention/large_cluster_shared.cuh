// Shared memory of the kernels of large_cluster.cu.
//
// Keys and values come in units of two blocks, each 64 rows of 64 columns. Of keys, the blocks are
// the two halves of a kv tile; of values, they are of one of these halves, the second has the
// columns of the second warpgroup.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_LARGE_CLUSTER_SHARED_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_LARGE_CLUSTER_SHARED_CUH_

#include "common/attention_arguments.h"
#include "cuda/attention/hopper.cuh"
#include "cuda/attention/large_half.cuh"
#include "cuda/attention/large_segments.cuh"
#include "cuda/attention/mma.cuh"

namespace flashxla::attention {

// Keys of a kv tile and of half of it.
constexpr int kClusterHalfKeys = 64, kClusterKeys = 2 * kClusterHalfKeys;
constexpr int kClusterBlockBytes = 64 * kLargeRowBytes;
constexpr int kClusterConsumers = 2 * kWarpgroupThreads;
constexpr int kClusterLoaders = kWarpgroupThreads / 32;  // warps
constexpr int kClusterThreads = kClusterConsumers + kWarpgroupThreads;

struct ClusterProblem {
  CUtensorMap k, v;
  Problem p;
  int box_keys;  // keys per TMA box, which lies in one page
};

struct alignas(1024) ClusterShared {
  static constexpr int kUnits = 8;
  static constexpr int kMasks = 4;  // kv tiles: more than have units on the way

  char queries[LargeBlocks(kMaxHeadSize)][kClusterBlockBytes];
  char units[kUnits][2][kClusterBlockBytes];
  uint4 weights[2][kClusterHalfKeys / 16][kWarpgroupThreads];  // of each half
  LargeExchange exchange;
  // Which keys of a half exist; and which do not, though their boxes are there.
  uint64_t exist[kMasks][2], stale[kMasks][2];
  uint64_t full[kUnits], empty[kUnits];

#if defined(FLASHXLA_HOPPER)
  __device__ void InitBarriers() {
    for (int i = 0; i < kUnits; ++i) {
      InitBarrier(SharedAddress(&full[i]), 1);
      // Also of the other thread block's warps: what this one loads goes to both.
      InitBarrier(SharedAddress(&empty[i]), kClusterConsumers + kClusterConsumers / 32);
    }
    FenceProxy();
  }
#endif
};
static_assert(sizeof(ClusterShared) <= 227 * 1024);

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_LARGE_CLUSTER_SHARED_CUH_
