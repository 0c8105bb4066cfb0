// tile: 16-bit dtypes and head sizes up to 256, with the warp-wide tensor core instructions of all
// GPUs since Ampere.
#include "cuda/attention/dispatch.cuh"
#include "cuda/attention_backward/tile_kernels.cuh"

namespace flashxla::attention_backward {
namespace {

const char* WhyNotTile(const Problem& p) {
  if (p.dtype == FLASHXLA_F32) return "float32 has an engine of its own";
  return WhyNoTiles(p);
}

flashxla_status LaunchTile(const Problem& p, cudaStream_t stream) {
  attention::WithInstance(p.dtype, p.LargerHeadSize(), false, [&](auto t, auto dims, auto) {
    LaunchTileKernels<typename decltype(t)::type, decltype(dims)::value>(p, stream);
  });
  return FLASHXLA_OK;
}

}  // namespace

const Engine kTileEngine = {"tile", "tensor cores", WhyNotTile, nullptr, nullptr, LaunchTile, true};

}  // namespace flashxla::attention_backward
