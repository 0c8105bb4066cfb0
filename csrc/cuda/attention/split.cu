// kSplit: sequences with few queries (decode). Reading the keys is all the work, so every
// multiprocessor reads an equal share of them.
#include <algorithm>
#include <type_traits>

#include "cuda/attention/dispatch.cuh"
#include "cuda/attention/engines.h"
#include "cuda/attention/split.cuh"
#include "cuda/attention/warp_attention.cuh"

namespace flashxla::attention {
namespace {

constexpr int kWarps = kSplitKeys / kSliceKeys;

template <int kDims, bool kFp8>
struct Shared {
  static constexpr int kStages = kDims > 128 ? 2 : 3;
  static constexpr int kWideBytes = kFp8 ? 2 * kSliceBytes<kDims> : 0;  // of a warp
  static constexpr int kWarpBytes = kStages * KeyLoader<kDims, kFp8>::kStageBytes + kWideBytes;
  static constexpr int kExchangeFloats = 2 * kSplitRows * kDims;
  static constexpr int kBytes =
      kWarps * kWarpBytes + (kExchangeFloats + 2 * kWarps * kSplitRows) * sizeof(float);
};

// The steps of one warp in order: which tile, which keys.
struct Cursor {
  SplitTile tile;
  int x, tile_end;

  __device__ void Start(const Problem& p, int first) {
    x = first;
    tile.Find(p, x);
    tile_end = tile.start + tile.num_steps;
  }
  __device__ void Next(const Problem& p, int end) {
    if (++x == tile_end && x < end) Start(p, x);
  }
  // This warp's first key of the step.
  __device__ int first_key() const {
    return (tile.sequence.first_step + x - tile.start) * kSplitKeys +
           static_cast<int>(threadIdx.x) / 32 * kSliceKeys;
  }
};

// Adds up the warps' parts of a tile. Warp 0 then holds the whole.
template <typename T, int kDims>
__device__ void Combine(WarpAttention<T, kDims>& part, float* exchange, float* tops, float* sums) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  part.FinishSums();
  if (lane % 4 == 0) {
    for (int r = 0; r < 2; ++r) {
      tops[warp * kSplitRows + lane / 4 + 8 * r] = part.top[r];
      sums[warp * kSplitRows + lane / 4 + 8 * r] = part.sum[r];
    }
  }
  __syncthreads();
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = lane / 4 + 8 * r;
    float top = -INFINITY, sum = 0.f;
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, tops[w * kSplitRows + row]);
    const float base = top == -INFINITY ? 0.f : top;
    for (int w = 0; w < kWarps; ++w) {
      sum += sums[w * kSplitRows + row] * Exp2(tops[w * kSplitRows + row] - base);
    }
    factor[r] = Exp2(part.top[r] - base);
    part.top[r] = top, part.sum[r] = sum;
  }
#pragma unroll
  for (int n = 0; n < kDims / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) part.out[n][i] *= factor[i / 2];
  }
  // A tree, so that the order of the sum is fixed. Each lane meets its own counterpart.
#pragma unroll
  for (int width = kWarps / 2; width > 0; width /= 2) {
    float* mine = exchange + (warp % width) * kSplitRows * kDims + lane;
    if (warp >= width && warp < 2 * width) {
#pragma unroll
      for (int n = 0; n < kDims / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) mine[(n * 4 + i) * 32] = part.out[n][i];
      }
    }
    __syncthreads();
    if (warp < width) {
#pragma unroll
      for (int n = 0; n < kDims / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) part.out[n][i] += mine[(n * 4 + i) * 32];
      }
    }
    __syncthreads();
  }
}

template <typename T, int kDims>
__device__ void StorePartial(const WarpAttention<T, kDims>& part, float* partial) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = lane / 4 + 8 * r;
#pragma unroll
    for (int n = 0; n < kDims / 8; ++n) {
      *reinterpret_cast<float2*>(partial + row * kDims + n * 8 + lane % 4 * 2) =
          make_float2(part.out[n][2 * r], part.out[n][2 * r + 1]);
    }
    if (lane % 4 == 0) {
      partial[kSplitRows * kDims + row] = part.top[r];
      partial[kSplitRows * (kDims + 1) + row] = part.sum[r];
    }
  }
}

template <typename T, int kDims, bool kFp8>
__global__ void __launch_bounds__(32 * kWarps, kDims > 128 ? 1 : 2)
    SplitKernel(const __grid_constant__ Problem p, float* workspace) {
  using S = Shared<kDims, kFp8>;
  using Loader = KeyLoader<kDims, kFp8>;
  const int kv_head = blockIdx.x;
  const int total = p.plan.totals[kSplit];
  const int share = SplitShare(total, gridDim.y);
  const int begin = static_cast<int>(blockIdx.y) * share;
  const int end = min(begin + share, total);
  if (begin >= end) return;

  extern __shared__ __align__(16) char shared[];
  const int warp = threadIdx.x / 32;
  char* stages = shared + warp * S::kWarpBytes;
  char* wide = stages + S::kStages * Loader::kStageBytes;
  float* exchange = reinterpret_cast<float*>(shared + kWarps * S::kWarpBytes);
  float* tops = exchange + S::kExchangeFloats;
  float* sums = tops + kWarps * kSplitRows;
  if (p.head_size < kDims) {  // columns behind head_size: see KeyLoader
    for (int i = threadIdx.x * 16; i < kWarps * S::kWarpBytes; i += blockDim.x * 16) {
      *reinterpret_cast<uint4*>(shared + i) = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
  }

  Cursor load, compute;
  load.Start(p, begin);
  compute = load;
  auto find = [&] {
    return load.x < end ? KeyPlaces::Find(p, load.tile.sequence, load.tile.index, load.first_key())
                        : KeyPlaces::None();
  };
  KeyPlaces places = find();
  uint64_t masks = 0;  // 16 bits a stage in flight, the oldest lowest
  auto start_load = [&](int stage) {
    masks = masks >> 16 | uint64_t{places.mask} << (16 * (S::kStages - 1));
    if (load.x < end) {
      Loader::Start(p, places, kv_head, stages + stage * Loader::kStageBytes);
      load.Next(p, end);
      places = find();
    }
    CommitCopies();
  };
#pragma unroll 1
  for (int stage = 0; stage < S::kStages; ++stage) start_load(stage);

  WarpAttention<T, kDims> part;
  int segment = begin;  // first step of this tile here
  int stage = 0;
  part.Begin(p, compute.tile.sequence, compute.tile.index, kv_head, compute.tile.first_row());
  while (true) {
    WaitCopies<S::kStages - 1>();
    __syncwarp();
    char* keys = stages + stage * Loader::kStageBytes;
    uint32_t address = SharedAddress(keys);
    if constexpr (kFp8) {
      WidenFp8<T, kDims>(keys, wide, p.kv_dtype == FLASHXLA_F8E5M2);
      __syncwarp();
      address = SharedAddress(wide);
    }
    part.Step(p, address, address + kSliceBytes<kDims>, compute.first_key(), masks & 0xffffu);
    __syncwarp();
    start_load(stage);
    stage = stage + 1 == S::kStages ? 0 : stage + 1;

    const bool last = compute.x + 1 == end;
    if (!last && compute.x + 1 != compute.tile_end) {
      ++compute.x;
      continue;
    }
    Combine(part, exchange, tops, sums);
    const SplitTile& tile = compute.tile;
    if (warp == 0) {
      if (segment == tile.start && compute.x + 1 == compute.tile_end) {
        part.Store(p, tile.sequence, tile.index, kv_head, tile.first_row());
      } else {
        StorePartial(part,
                     workspace + PartialSlot(kv_head, blockIdx.y, gridDim.y, segment != begin) *
                                     kPartialFloats<kDims>);
      }
    }
    if (last) break;
    compute.Next(p, end);
    segment = compute.x;
    part.Begin(p, compute.tile.sequence, compute.tile.index, kv_head, compute.tile.first_row());
  }
}

}  // namespace

int SplitBlocks(int64_t head_size, int num_kv_heads) {
  const int blocks = NumMultiprocessors() * (DimsBucket(head_size) > 128 ? 1 : 2);
  return std::max(std::min(blocks, kMaxSplitBlocks) / num_kv_heads, 1);
}

int64_t SplitSharedBytes(int64_t head_size, bool fp8) {
  int64_t bytes = 0;
  WithInstance(FLASHXLA_BF16, head_size, fp8, [&](auto, auto dims, auto is_fp8) {
    bytes = Shared<decltype(dims)::value, decltype(is_fp8)::value>::kBytes;
  });
  return bytes;
}

void LaunchSplit(const Problem& p, float* workspace, cudaStream_t stream) {
  WithInstance(p.out_dtype, p.head_size, IsFp8(p.kv_dtype), [&](auto t, auto dims, auto is_fp8) {
    using T = typename decltype(t)::type;
    constexpr int kDims = decltype(dims)::value;
    constexpr bool kFp8 = decltype(is_fp8)::value;
    constexpr int kBytes = Shared<kDims, kFp8>::kBytes;
    auto* kernel = SplitKernel<T, kDims, kFp8>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    const dim3 blocks(p.num_kv_heads, SplitBlocks(p.head_size, p.num_kv_heads));
    kernel<<<blocks, 32 * kWarps, kBytes, stream>>>(p, workspace);
  });
}

}  // namespace flashxla::attention
