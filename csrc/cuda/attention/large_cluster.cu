// large and large_split on Hopper, for 16-bit heads above 256 whose keys TMA can load.
//
// A thread block has registers for 64 rows. With so few it would ask L2 for more than that can
// give. So two thread blocks, a cluster, have neighbouring rows of a sequence and KV head, and each
// loads half of the keys and values for both.
#include "common/error.h"
#include "cuda/attention/dispatch.cuh"
#include "cuda/attention/large_cluster.h"
#include "cuda/attention/large_cluster_consume.cuh"
#include "cuda/attention/large_cluster_load.cuh"
#include "cuda/attention/tensor_map.h"
#include "cuda/launch.h"

namespace flashxla::attention {
namespace {

// Of a thread.
constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;

#if defined(FLASHXLA_HOPPER)

// Computes the segments that for_each(body) calls body with. Each warp finds them itself: then the
// compiler knows that its threads go the same way, and keeps what they have in common once.
template <typename T, int kValueBlocks, typename ForEach>
__device__ void ComputeSegments(const ClusterProblem& w, const PartialShape* partials,
                                ForEach&& for_each) {
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<ClusterShared*>(memory);
  if (threadIdx.x == 0) {
    if (SharedAddress(memory) % 1024 != 0) __trap();  // as the swizzle needs it
    PrefetchMap(&w.k), PrefetchMap(&w.v);
    shared.InitBarriers();
  }
  SyncCluster();
  TriggerNext();
  WaitForPrevious();
  if (threadIdx.x < kClusterConsumers) {
    RaiseRegisters<kConsumerRegisters>();
    ClusterConsumer<T, kValueBlocks> consumer(w.p, partials, shared);
    for_each([&](const LargeSegment& segment) { consumer.Compute(segment); });
  } else {
    LowerRegisters<kProducerRegisters>();
    ClusterLoader<kValueBlocks> loader(w, shared);
    for_each([&](const LargeSegment& segment) { loader.Load(segment); });
  }
  SyncCluster();  // the other thread block may still reach this one's memory
}

#endif  // FLASHXLA_HOPPER

template <typename T, int kValueBlocks>
__global__ void FLASHXLA_CLUSTER(kClusterSize) __launch_bounds__(kClusterThreads, 1)
    LargeClusterKernel(const __grid_constant__ ClusterProblem w) {
#if defined(FLASHXLA_HOPPER)
  ComputeSegments<T, kValueBlocks>(w, nullptr, [&](auto&& body) {
    ForEachRestSegment<kClusterKeys>(w.p, kClusterQTileRows, blockIdx.x / kClusterSize,
                                     gridDim.x / kClusterSize, body);
  });
#endif
}

template <typename T, int kValueBlocks>
__global__ void FLASHXLA_CLUSTER(kClusterSize) __launch_bounds__(kClusterThreads, 1)
    LargeSplitClusterKernel(const __grid_constant__ ClusterProblem w,
                            const SplitWorkspace workspace) {
#if defined(FLASHXLA_HOPPER)
  const int kv_head = blockIdx.x / kClusterSize, block = blockIdx.y;
  ComputeSegments<T, kValueBlocks>(w, &workspace.shape, [&](auto&& body) {
    const SplitTile begun = ForEachSplitSegment(w.p, workspace, kv_head, block, body);
    if (threadIdx.x == 0) workspace.tile(kv_head, block) = begun;
  });
#endif
}

// Fills in the rest of w, and calls body(Type<T>, integral_constant<int, kValueBlocks>).
template <typename Body>
flashxla_status WithInstanceOf(ClusterProblem& w, Body&& body) {
  const Problem& p = w.p;
  w.box_keys = KeysOfBox(p, kClusterHalfKeys);
  if (!MapCache(p, p.k, kLargeBlockColumns, w.box_keys, false, &w.k) ||
      !MapCache(p, p.v, kLargeBlockColumns, w.box_keys, false, &w.v)) {
    return SetError(FLASHXLA_DEVICE_ERROR, "the driver refuses a tensor map of k or v");
  }
  auto with_values = [&](auto t) {
    const int blocks = (LargeBlocks(p.v.head_size) + 1) / 2;
    blocks <= 2   ? body(t, std::integral_constant<int, 2>{})
    : blocks == 3 ? body(t, std::integral_constant<int, 3>{})
                  : body(t, std::integral_constant<int, 4>{});
  };
  p.out_dtype == FLASHXLA_F16 ? with_values(Type<__half>{}) : with_values(Type<__nv_bfloat16>{});
  return FLASHXLA_OK;
}

}  // namespace

bool SuitsClusters(const Problem& p) {
  return LoadedImage().hopper && HasLargeHeads(p) && !IsFp8(p.kv_dtype) && !p.batch_invariant &&
         WhyNoCacheBoxes(p, 8)[0] == '\0';
}

flashxla_status LaunchLargeClusters(const Problem& p, cudaStream_t stream) {
  ClusterProblem w = {};
  w.p = p;
  return WithInstanceOf(w, [&](auto t, auto blocks) {
    auto* kernel = LargeClusterKernel<typename decltype(t)::type, decltype(blocks)::value>;
    LaunchDependent(kernel, (NumRestBlocks(p, 1) + kClusterSize - 1) / kClusterSize * kClusterSize,
                    kClusterThreads, sizeof(ClusterShared), stream, w);
  });
}

flashxla_status LaunchLargeSplitClusters(const Problem& p, void* workspace, cudaStream_t stream) {
  ClusterProblem w = {};
  w.p = p;
  return WithInstanceOf(w, [&](auto t, auto blocks) {
    using T = typename decltype(t)::type;
    LaunchDependent(LargeSplitClusterKernel<T, decltype(blocks)::value>,
                    dim3(kClusterSize * p.num_kv_heads, p.few.num_blocks), kClusterThreads,
                    sizeof(ClusterShared), stream, w, SplitWorkspace(p, workspace));
  });
}

}  // namespace flashxla::attention
