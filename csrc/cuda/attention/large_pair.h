// What large and large_split launch for pairs of thread blocks (large_pair.cu).
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_LARGE_PAIR_H_
#define FLASHXLA_CSRC_CUDA_ATTENTION_LARGE_PAIR_H_

#include <cuda_runtime.h>

#include "cuda/attention/problem.cuh"

namespace flashxla::attention {

// Whether these kernels can serve a call that large or large_split takes.
bool SuitsPairs(const Problem& problem);
// Both need that, and a plan with q tiles of kPairedQTileRows.
flashxla_status LaunchLargePairs(const Problem& problem, cudaStream_t stream);
flashxla_status LaunchLargeSplitPairs(const Problem& problem, void* workspace, cudaStream_t stream);

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_LARGE_PAIR_H_
