// tile32: float32 and head sizes up to 256, by the same kernels as tile.
#include "cuda/attention/dispatch.cuh"
#include "cuda/attention_backward/tile32_products.cuh"
#include "cuda/attention_backward/tile_kernels.cuh"

namespace flashxla::attention_backward {
namespace {

const char* WhyNotTile32(const Problem& p) {
  if (p.dtype != FLASHXLA_F32) return "only for float32";
  if (const char* why = WhyNoTiles(p); why[0] != '\0') return why;
  int bytes = 0;
  attention::UsualHeadSizes::With(p.LargerHeadSize(), [&](auto dims) {
    bytes = KeyTile<float, decltype(dims)::value>::kBytes;
  });
  return HasSharedMemory(bytes) ? "" : "the GPU has too little shared memory";
}

flashxla_status LaunchTile32(const Problem& p, cudaStream_t stream) {
  attention::UsualHeadSizes::With(p.LargerHeadSize(), [&](auto dims) {
    LaunchTileKernels<float, decltype(dims)::value>(p, stream);
  });
  return FLASHXLA_OK;
}

}  // namespace

const Engine kTile32Engine = {
    "tile32",     "tensor cores: three products of TF32 for one of float32",
    WhyNotTile32, nullptr,
    nullptr,      LaunchTile32,
    true};

}  // namespace flashxla::attention_backward
