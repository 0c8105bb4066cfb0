// The last kernel of a call whose engines do not do its work: combines the partial results of q
// tiles whose keys were split, and writes the rows that see no key.
#include "cuda/attention/combine.cuh"
#include "cuda/attention/dispatch.cuh"
#include "cuda/attention/engines.h"
#include "cuda/launch.h"

namespace flashxla::attention {
namespace {

constexpr int kWarps = 16;
constexpr int kThreads = 32 * kWarps;

template <int kDims>
__global__ void __launch_bounds__(kThreads)
    CombineKernel(const __grid_constant__ Problem p, const SplitWorkspace workspace) {
  TriggerNext();
  WaitForPrevious();
  CombineAll<kDims>(p, workspace, blockIdx.x * kWarps + threadIdx.x / 32, gridDim.x * kWarps);
}

}  // namespace

void LaunchCombine(const Problem& p, void* workspace, cudaStream_t stream) {
  const SplitWorkspace parts(p, workspace);
  WithInstance(FLASHXLA_BF16, parts.shape.dims, false, [&](auto, auto dims, auto) {
    LaunchDependent(CombineKernel<decltype(dims)::value>, 2 * NumMultiprocessors(), kThreads, 0,
                    stream, p, parts);
  });
}

}  // namespace flashxla::attention
