// tile32: any sequence with float32 queries. Tensor cores take each number as two of TF32; CUDA
// cores compute few rows, and those in which a number is not finite.
#include <algorithm>

#include "common/tensor_view.h"
#include "cuda/attention/engines.h"
#include "cuda/attention/simt_few.cuh"
#include "cuda/attention/simt_tile.cuh"
#include "cuda/attention/tf32_tile.cuh"
#include "cuda/launch.h"

namespace flashxla::attention {
namespace {

// How a head size is computed.
template <int kDimsOf, int kKeysOf, int kWarpsOf, bool kOneBufferOf, int kBlocksOf>
struct Shape {
  static constexpr int kDims = kDimsOf, kKeys = kKeysOf, kWarps = kWarpsOf;
  static constexpr bool kOneBuffer = kOneBufferOf;
  static constexpr int kBlocks = kBlocksOf;  // of a multiprocessor
  static constexpr int kBytes =
      static_cast<int>(std::max(sizeof(FloatTilesShared<kDims, kKeys, kWarps, kOneBuffer>),
                                sizeof(SimtFewShared<kDims, kWarps>)));
};

template <typename S, bool kFp8>
__global__ void __launch_bounds__(32 * S::kWarps, S::kBlocks)
    Tile32Kernel(const __grid_constant__ Problem p) {
  extern __shared__ __align__(16) char shared[];
  // Not in registers, which the arithmetic needs.
  __shared__ __align__(16) char item_storage[sizeof(SimtItem)];
  SimtItem& item = *reinterpret_cast<SimtItem*>(item_storage);
  using Tiles = FloatTiles<S::kDims, S::kKeys, S::kWarps, kFp8, S::kOneBuffer>;
  using Few = SimtFew<S::kDims, S::kWarps, kFp8>;
  TriggerNext();
  WaitForPrevious();
  const int num_tiles = p.plan.totals[kRest];
  const int64_t num_items = int64_t{num_tiles} * p.num_kv_heads;
  // Each block takes an item in each round. Every other round goes in the opposite direction: the
  // work of neighbouring items differs a little, so that all blocks get about the same.
  bool back = false;
  for (int64_t round = 0; round < num_items; round += gridDim.x, back = !back) {
    const int64_t i = round + (back ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    if (i >= num_items) continue;
    __syncthreads();         // the previous item is done
    if (threadIdx.x < 32) {  // a whole warp, for FindStart
      // Backwards: the last q tiles of a sequence see the most keys and should start first.
      const int tile = num_tiles - 1 - static_cast<int>(i / p.num_kv_heads);
      const SimtItem found = SimtItem::OfRest(p, tile, static_cast<int>(i % p.num_kv_heads));
      if (threadIdx.x == 0) item = found;
    }
    __syncthreads();
    if (item.num_rows <= kFewRows && !p.batch_invariant) {
      Few::Attend(p, item, *reinterpret_cast<typename Few::Shared*>(shared));
    } else {
      auto& of_tiles = *reinterpret_cast<typename Tiles::Shared*>(shared);
      Tiles::Begin(p, item, of_tiles);
      if (!Tf32Tile<Tiles>::Attend(p, item, of_tiles)) SimtTile<Tiles>::Attend(p, item, of_tiles);
    }
  }
}

// Launches the kernel of the first shape whose shared memory the GPU has.
template <typename S, typename... Others>
void Launch(const Problem& p, cudaStream_t stream) {
  if constexpr (sizeof...(Others) > 0) {
    if (!HasSharedMemory(S::kBytes)) return Launch<Others...>(p, stream);
  }
  auto* kernel = IsFp8(p.kv_dtype) ? Tile32Kernel<S, true> : Tile32Kernel<S, false>;
  LaunchDependent(kernel, S::kBlocks * NumMultiprocessors(), 32 * S::kWarps, S::kBytes, stream, p);
}

const char* WhyNotTile32(const Facts& facts) {
  if (const char* why = WhyNotUsual(facts.problem); why[0] != '\0') return why;
  return facts.problem.q_dtype == FLASHXLA_F32 ? "" : "queries are not float32";
}

flashxla_status LaunchTile32(const Problem& p, void*, cudaStream_t stream) {
  if (p.plan.num_sequences == 0) return FLASHXLA_OK;
  if (p.LargerHeadSize() <= 64) {
    Launch<Shape<64, 64, 4, false, 2>>(p, stream);
  } else if (p.LargerHeadSize() <= 128) {
    Launch<Shape<128, 64, 4, false, 2>, Shape<128, 32, 4, false, 1>>(p, stream);
  } else {
    Launch<Shape<256, 32, 4, true, 2>, Shape<256, 16, 4, true, 1>>(p, stream);
  }
  return FLASHXLA_OK;
}

}  // namespace

const Engine kTile32Engine = {"tile32", "tensor cores, two TF32 numbers for one of float32",
                              kRest,    WhyNotTile32,
                              nullptr,  LaunchTile32};

}  // namespace flashxla::attention
