// simt: any sequence with float32 queries. On CUDA cores, because tensor cores would round the
// inputs to 11 bits.
#include <algorithm>

#include "common/tensor_view.h"
#include "cuda/attention/engines.h"
#include "cuda/attention/simt_few.cuh"
#include "cuda/attention/simt_tile.cuh"
#include "cuda/launch.h"

namespace flashxla::attention {
namespace {

template <int kDims, int kKeys, bool kFp8>
__global__ void __launch_bounds__(kSimtThreads, 2) SimtKernel(const __grid_constant__ Problem p) {
  extern __shared__ __align__(16) char shared[];
  // Not in registers, which the arithmetic needs.
  __shared__ __align__(16) char item_storage[sizeof(SimtItem)];
  SimtItem& item = *reinterpret_cast<SimtItem*>(item_storage);
  using Tile = SimtTile<kDims, kKeys, kFp8>;
  using Few = SimtFew<kDims, kFp8>;
  TriggerNext();
  WaitForPrevious();
  const int num_tiles = p.plan.totals[kRest];
  const int64_t num_items = int64_t{num_tiles} * p.num_kv_heads;
  for (int64_t i = blockIdx.x; i < num_items; i += gridDim.x) {
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
      Tile::Attend(p, item, *reinterpret_cast<typename Tile::Shared*>(shared));
    }
  }
}

template <int kDims, int kKeys>
constexpr int kSharedBytes =
    static_cast<int>(std::max(sizeof(SimtTileShared<kDims, kKeys>), sizeof(SimtFewShared<kDims>)));

template <int kDims, int kKeys>
void Launch(const Problem& p, cudaStream_t stream) {
  auto* kernel =
      IsFp8(p.kv_dtype) ? SimtKernel<kDims, kKeys, true> : SimtKernel<kDims, kKeys, false>;
  constexpr int kBytes = kSharedBytes<kDims, kKeys>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  LaunchDependent(kernel, 2 * NumMultiprocessors(), kSimtThreads, kBytes, stream, p);
}

const char* WhyNotSimt(const Facts& facts) {
  if (const char* why = WhyOnlyGeneral(facts.problem); why[0] != '\0') return why;
  return facts.problem.q_dtype == FLASHXLA_F32 ? "" : "queries are not float32";
}

flashxla_status LaunchSimt(const Problem& p, void*, cudaStream_t stream) {
  if (p.plan.num_sequences == 0) return FLASHXLA_OK;
  if (p.head_size <= 64) {
    Launch<64, 64>(p, stream);
  } else if (p.head_size <= 128) {
    Launch<128, 64>(p, stream);
  } else if (DeviceAttribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, kHopper.shared) >=
             kSharedBytes<256, 32>) {
    Launch<256, 32>(p, stream);
  } else {
    Launch<256, 16>(p, stream);
  }
  return FLASHXLA_OK;
}

}  // namespace

const Engine kSimtEngine = {"simt", "CUDA cores", kRest, WhyNotSimt, nullptr, LaunchSimt};

}  // namespace flashxla::attention
