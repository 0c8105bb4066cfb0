// What large and large_split launch for clusters of two thread blocks (large_cluster.cu).
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_LARGE_CLUSTER_H_
#define FLASHXLA_CSRC_CUDA_ATTENTION_LARGE_CLUSTER_H_

#include <cuda_runtime.h>

#include "cuda/attention/problem.cuh"

namespace flashxla::attention {

// Whether these kernels can serve a call that large or large_split takes.
bool SuitsClusters(const Problem& problem);
// Both need that, and a plan with q tiles of kClusterQTileRows.
flashxla_status LaunchLargeClusters(const Problem& problem, cudaStream_t stream);
flashxla_status LaunchLargeSplitClusters(const Problem& problem, void* workspace,
                                         cudaStream_t stream);

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_LARGE_CLUSTER_H_
