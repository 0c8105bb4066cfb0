// swap's instances whose keys threads copy.
#include "cuda/attention/dispatch.cuh"
#include "cuda/attention/swap_kernel.cuh"

namespace flashxla::attention {

void LaunchSwapCopied(const SwapProblem& w, void* workspace, cudaStream_t stream) {
  const Problem& p = w.p;
  auto launch = [&](auto out, auto dims, auto fp8) {
    using Out = typename decltype(out)::type;
    constexpr bool kFp8 = decltype(fp8)::value;
    using Product = std::conditional_t<kFp8, __half, Out>;
    constexpr int kDims = decltype(dims)::value;
    constexpr SwapKind kKind = SwapKind::kCopied;
    if constexpr (kDims <= kMaxUsualHeadSize) {
      if (p.few.q_tile_rows > kSplitQTileRows) {
        return LaunchSwapKernel<SwapShape<Product, Out, kDims, kFp8, kSwapQTileRows, kKind>>(
            w, workspace, stream);
      }
    }
    LaunchSwapKernel<SwapShape<Product, Out, kDims, kFp8, kSplitQTileRows, kKind>>(w, workspace,
                                                                                   stream);
  };
  WithInstance<CopiedHeadSizes>(p, launch);
}

}  // namespace flashxla::attention
