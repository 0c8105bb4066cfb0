// tile: any sequence, with the warp-wide tensor core instructions of all GPUs since Ampere. A
// thread block computes a q tile of 64 rows, 16 rows per warp. Each warp loads 16 keys of a kv
// tile, which all warps use.
#include "common/tensor_view.h"
#include "cuda/attention/dispatch.cuh"
#include "cuda/attention/engines.h"
#include "cuda/attention/rest_tile.cuh"
#include "cuda/attention/warp_attention.cuh"

namespace flashxla::attention {
namespace {

constexpr int kWarps = kRestQTileRows / 16;
constexpr int kKvTileKeys = kWarps * kSliceKeys;
constexpr int kStages = 2;

template <int kDims, bool kFp8>
struct Shared {
  static constexpr int kStageBytes = kWarps * KeyLoader<kDims, kFp8>::kStageBytes;
  static constexpr int kWideBytes = kFp8 ? kWarps * 2 * kSliceBytes<kDims> : 0;
  static constexpr int kMaskBytes = 16 * kStages;
  static constexpr int kBytes = kStages * kStageBytes + kWideBytes + kMaskBytes;
};

template <typename T, int kDims, bool kFp8>
__global__ void __launch_bounds__(32 * kWarps, kDims > 128 ? 1 : 3)
    TileKernel(const __grid_constant__ Problem p) {
  using S = Shared<kDims, kFp8>;
  using Loader = KeyLoader<kDims, kFp8>;
  extern __shared__ __align__(16) char shared[];
  char* wide = shared + kStages * S::kStageBytes;
  auto* masks = reinterpret_cast<uint32_t*>(wide + S::kWideBytes);  // [stage][warp]
  const int warp = threadIdx.x / 32;

  TriggerNext();
  WaitForPrevious();
  const int num_items = RestTile::Count(p);
  if (static_cast<int>(blockIdx.x) >= num_items) return;
  if (p.LacksDims(kDims)) {  // columns past head_size: see KeyLoader
    for (int i = threadIdx.x * 16; i < kStages * S::kStageBytes + S::kWideBytes;
         i += blockDim.x * 16) {
      *reinterpret_cast<uint4*>(shared + i) = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
  }

  for (int item = blockIdx.x; item < num_items; item += gridDim.x) {
    const RestTile tile(p, item);
    const int first = tile.seen.begin / kKvTileKeys * kKvTileKeys, last = tile.seen.end;

    auto load = [&](int stage, int key) {
      KeyPlaces places = KeyPlaces::None();
      if (key < last) {
        places = KeyPlaces::Find(p, tile.s, tile.index, key + warp * kSliceKeys);
        places.Resolve(p);
        Loader::Start(p, places, tile.kv_head,
                      shared + stage * S::kStageBytes + warp * Loader::kStageBytes);
      }
      if (threadIdx.x % 32 == 0) masks[stage * kWarps + warp] = places.mask;
      CommitCopies();
    };
    load(0, first);
    load(1, first + kKvTileKeys);
    WarpAttention<std::conditional_t<kFp8, __half, T>, kDims, T> rows;
    rows.Begin(p, tile.s, tile.index, tile.kv_head, tile.first_row + warp * 16);
    int stage = 0;
    for (int key = first; key < last; key += kKvTileKeys) {
      WaitCopies<kStages - 1>();
      char* mine = shared + stage * S::kStageBytes + warp * Loader::kStageBytes;
      uint32_t address = SharedAddress(shared + stage * S::kStageBytes);
      if constexpr (kFp8) {
        __syncwarp();
        WidenFp8<kDims>(mine, wide + warp * 2 * kSliceBytes<kDims>, p.kv_dtype == FLASHXLA_F8E5M2);
        address = SharedAddress(wide);
      }
      __syncthreads();
#pragma unroll 1
      for (int slice = 0; slice < kWarps; ++slice) {
        const uint32_t keys = address + slice * 2 * kSliceBytes<kDims>;
        const int slice_key = key + slice * kSliceKeys;
        if (slice_key < last) {
          rows.Step(p, keys, keys + kSliceBytes<kDims>, slice_key, masks[stage * kWarps + slice]);
        }
      }
      __syncthreads();
      load(stage, key + kStages * kKvTileKeys);
      stage ^= 1;
    }
    WaitCopies<0>();
    rows.ReduceRowSums();
    rows.Store(p, tile.s, tile.index, tile.kv_head, tile.first_row + warp * 16);
    __syncthreads();
  }
}

const char* WhyNotTile(const Facts& facts) { return WhyNot16Bit(facts.problem); }

flashxla_status LaunchTile(const Problem& p, void*, cudaStream_t stream) {
  WithInstance(p, [&](auto t, auto dims, auto is_fp8) {
    using T = typename decltype(t)::type;
    constexpr int kDims = decltype(dims)::value;
    constexpr bool kFp8 = decltype(is_fp8)::value;
    constexpr int kBytes = Shared<kDims, kFp8>::kBytes;
    auto* kernel = TileKernel<T, kDims, kFp8>;
    LaunchDependent(kernel, NumRestBlocks(p, kDims > 128 ? 1 : 3), 32 * kWarps, kBytes, stream, p);
  });
  return FLASHXLA_OK;
}

}  // namespace

const Engine kTileEngine = {"tile", "tensor cores", kRest, WhyNotTile, nullptr, LaunchTile};

}  // namespace flashxla::attention
