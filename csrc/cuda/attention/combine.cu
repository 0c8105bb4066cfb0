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
  const int warp = threadIdx.x / 32;
  // A block takes kWarps rows of a q tile at a time.
  const int slabs = (workspace.shape.rows + kWarps - 1) / kWarps;
  const int blocks = workspace.blocks * p.num_kv_heads;
  for (int i = blockIdx.x; i < blocks * slabs; i += gridDim.x) {
    const int slab = i / blocks, kv_head = i % blocks % p.num_kv_heads;
    const int block = i % blocks / p.num_kv_heads;
    const SplitTile tile = workspace.tile(kv_head, block);
    const int row = slab * kWarps + warp;
    if (tile.num_parts == 0 || tile.first_row + row >= tile.num_queries * p.group_size) continue;
    CombineRow<kDims>(p, workspace, kv_head, block, tile, row);
  }
  StoreIdleTokens(p, blockIdx.x * kWarps + warp, gridDim.x * kWarps);
}

}  // namespace

void LaunchCombine(const Problem& p, void* workspace, cudaStream_t stream) {
  const SplitWorkspace parts(p, workspace);
  CombinedHeadSizes::With(parts.shape.dims, [&](auto dims) {
    LaunchDependent(CombineKernel<decltype(dims)::value>, 2 * NumMultiprocessors(), kThreads, 0,
                    stream, p, parts);
  });
}

}  // namespace flashxla::attention
