// split: sequences with few queries (decode), by split-KV. Reading the keys takes almost all the
// time, so all multiprocessors get equal shares of the batch's keys.
#include <type_traits>

#include "common/tensor_view.h"
#include "cuda/attention/dispatch.cuh"
#include "cuda/attention/engines.h"
#include "cuda/attention/split.cuh"
#include "cuda/attention/warp_attention.cuh"

namespace flashxla::attention {
namespace {

constexpr int kWarps = kFewKvTileKeys / kSliceKeys;
constexpr int kRows = kSplitQTileRows;

template <int kDims, bool kFp8>
struct Shared {
  static constexpr int kStages = kDims > 128 ? 2 : 3;
  static constexpr int kWideBytes = kFp8 ? 2 * kSliceBytes<kDims> : 0;  // of a warp
  static constexpr int kWarpBytes = kStages * KeyLoader<kDims, kFp8>::kStageBytes + kWideBytes;
  static constexpr int kExchangeFloats = 2 * kRows * kDims;
  static constexpr int kBytes =
      kWarps * kWarpBytes + (kExchangeFloats + 2 * kWarps * kRows) * sizeof(float);
};

// Combines the warps' parts of a q tile. Warp 0 gets the result.
template <typename T, int kDims, typename Out>
__device__ void CombineWarps(WarpAttention<T, kDims, Out>& part, float* exchange, float* row_maxes,
                             float* row_sums) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  part.ReduceRowSums();
  if (lane % 4 == 0) {
    for (int r = 0; r < 2; ++r) {
      row_maxes[warp * kRows + lane / 4 + 8 * r] = part.row_max[r];
      row_sums[warp * kRows + lane / 4 + 8 * r] = part.row_sum[r];
    }
  }
  __syncthreads();
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = lane / 4 + 8 * r;
    float row_max = -INFINITY, row_sum = 0.f;
    for (int w = 0; w < kWarps; ++w) row_max = fmaxf(row_max, row_maxes[w * kRows + row]);
    const float base = SoftmaxBase(row_max);
    for (int w = 0; w < kWarps; ++w) {
      row_sum += row_sums[w * kRows + row] * Exp2(row_maxes[w * kRows + row] - base);
    }
    factor[r] = Exp2(part.row_max[r] - base);
    part.row_max[r] = row_max, part.row_sum[r] = row_sum;
  }
#pragma unroll
  for (int n = 0; n < kDims / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) part.out[n][i] *= factor[i / 2];
  }
  // A tree, which fixes the order of the sums. Each lane adds the numbers of the same lane.
#pragma unroll
  for (int width = kWarps / 2; width > 0; width /= 2) {
    float* mine = exchange + (warp % width) * kRows * kDims + lane;
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

template <typename T, int kDims, typename Out>
__device__ void StorePartial(const WarpAttention<T, kDims, Out>& part, const PartialShape& shape,
                             float* partial) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = lane / 4 + 8 * r;
#pragma unroll
    for (int n = 0; n < kDims / 8; ++n) {
      *reinterpret_cast<float2*>(partial + row * shape.dims + n * 8 + lane % 4 * 2) =
          make_float2(part.out[n][2 * r], part.out[n][2 * r + 1]);
    }
    if (lane % 4 == 0) {
      partial[shape.row_max() + row] = part.row_max[r];
      partial[shape.row_sum() + row] = part.row_sum[r];
    }
  }
}

template <typename T, int kDims, bool kFp8>
__global__ void __launch_bounds__(32 * kWarps, FewBlocksEach(kDims, kRows))
    SplitKernel(const __grid_constant__ Problem p, const SplitWorkspace workspace) {
  using S = Shared<kDims, kFp8>;
  using Loader = KeyLoader<kDims, kFp8>;
  const int kv_head = blockIdx.x, warp = threadIdx.x / 32;
  TriggerNext();
  WaitForPrevious();
  const FewBlock block = p.plan.few_blocks[blockIdx.y];
  const int end = block.end;
  if (block.begin >= end) {
    if (threadIdx.x == 0) workspace.tile(kv_head, blockIdx.y).num_parts = 0;
    return;
  }

  extern __shared__ __align__(1024) char shared[];
  char* stages = shared + warp * S::kWarpBytes;
  char* wide = stages + S::kStages * Loader::kStageBytes;
  float* exchange = reinterpret_cast<float*>(shared + kWarps * S::kWarpBytes);
  float* row_maxes = exchange + S::kExchangeFloats;
  float* row_sums = row_maxes + kWarps * kRows;
  if (p.LacksDims(kDims)) {  // columns past head_size: see KeyLoader
    for (int i = threadIdx.x * 16; i < kWarps * S::kWarpBytes; i += blockDim.x * 16) {
      *reinterpret_cast<uint4*>(shared + i) = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
  }

  Cursor load(p, p.plan.sequences, block), compute(p, p.plan.sequences, block);
  auto find = [&] {
    return load.step < end
               ? KeyPlaces::Find(p, load.sequence, load.index, load.first_key() + warp * kSliceKeys)
               : KeyPlaces::None();
  };
  KeyPlaces places = find();
  uint64_t masks = 0;  // 16 bits per stage in flight, the oldest in the lowest bits
  auto start_load = [&](int stage) {
    places.Resolve(p);
    masks = masks >> 16 | uint64_t{places.mask} << (16 * (S::kStages - 1));
    if (load.step < end) {
      Loader::Start(p, places, kv_head, stages + stage * Loader::kStageBytes);
      load.Next(p);
      places = find();
    }
    CommitCopies();
  };
#pragma unroll 1
  for (int stage = 0; stage < S::kStages; ++stage) start_load(stage);

  WarpAttention<std::conditional_t<kFp8, __half, T>, kDims, T> part;
  int stage = 0;
  while (true) {  // q tiles
    const int segment = compute.step;
    const int segment_end = min(compute.tile_end, end);
    part.Begin(p, compute.sequence, compute.index, kv_head, compute.first_row);
    for (int key = compute.first_key() + warp * kSliceKeys; compute.step < segment_end;
         key += kFewKvTileKeys, ++compute.step) {
      char* keys = stages + stage * Loader::kStageBytes;
      const uint32_t mask = masks & 0xffffu;
      WaitCopies<S::kStages - 1>();
      __syncwarp();
      uint32_t address = SharedAddress(keys);
      if constexpr (kFp8) {
        WidenFp8<kDims>(keys, wide, p.kv_dtype == FLASHXLA_F8E5M2);
        __syncwarp();
        address = SharedAddress(wide);
      }
      part.Step(p, address, address + kSliceBytes<kDims>, key, mask);
      __syncwarp();
      start_load(stage);
      if (++stage == S::kStages) stage = 0;
    }

    CombineWarps(part, exchange, row_maxes, row_sums);
    const bool whole = segment == compute.tile_start && segment_end == compute.tile_end;
    if (warp == 0) {
      if (whole) {
        part.Store(p, compute.sequence, compute.index, kv_head, compute.first_row);
      } else {
        StorePartial(part, workspace.shape,
                     workspace.partial(kv_head, blockIdx.y, segment != block.begin));
      }
    }
    if (segment_end == end) {
      if (threadIdx.x == 0) {
        workspace.tile(kv_head, blockIdx.y) = compute.Begun(blockIdx.y, segment, block.begin);
      }
      return;
    }
    --compute.step;
    compute.Next(p);
  }
}

int64_t SharedBytes(const Problem& p) {
  int64_t bytes = 0;
  WithInstance(p, [&](auto, auto dims, auto is_fp8) {
    bytes = Shared<decltype(dims)::value, decltype(is_fp8)::value>::kBytes;
  });
  return bytes;
}

const char* WhyNotSplit(const Facts& facts) {
  const Problem& p = facts.problem;
  if (const char* why = WhyNot16Bit(p); why[0] != '\0') return why;
  if (!AreFewStepsCountable(facts, false)) return "the batch has too many keys for split-KV";
  return HasSharedMemory(SharedBytes(p)) ? "" : "the GPU has too little shared memory";
}

flashxla_status LaunchSplit(const Problem& p, void* workspace, cudaStream_t stream) {
  WithInstance(p, [&](auto t, auto dims, auto is_fp8) {
    using T = typename decltype(t)::type;
    constexpr int kDims = decltype(dims)::value;
    constexpr bool kFp8 = decltype(is_fp8)::value;
    constexpr int kBytes = Shared<kDims, kFp8>::kBytes;
    auto* kernel = SplitKernel<T, kDims, kFp8>;
    LaunchDependent(kernel, dim3(p.num_kv_heads, p.few.num_blocks), 32 * kWarps, kBytes, stream, p,
                    SplitWorkspace(p, workspace));
  });
  return FLASHXLA_OK;
}

}  // namespace

const Engine kSplitEngine = {"split",     "tensor cores, split-KV", kFew,
                             WhyNotSplit, SplitWorkspaceBytes,      LaunchSplit};

}  // namespace flashxla::attention
