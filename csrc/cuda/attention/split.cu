// split: sequences with few queries (decode), by split-KV. Reading the keys takes almost all the
// time, so all multiprocessors get equal shares of the batch's keys.
#include <algorithm>
#include <type_traits>

#include "common/tensor_view.h"
#include "cuda/attention/dispatch.cuh"
#include "cuda/attention/engines.h"
#include "cuda/attention/hopper.cuh"
#include "cuda/attention/split.cuh"
#include "cuda/attention/tensor_map.h"
#include "cuda/attention/warp_attention.cuh"

namespace flashxla::attention {
namespace {

constexpr int kWarps = kFewKvTileKeys / kSliceKeys;

template <int kDims, bool kFp8>
struct Shared {
  static constexpr int kStages = kDims > 128 ? 2 : 3;
  static constexpr int kWideBytes = kFp8 ? 2 * kSliceBytes<kDims> : 0;  // of a warp
  static constexpr int kWarpBytes = kStages * KeyLoader<kDims, kFp8>::kStageBytes + kWideBytes;
  static constexpr int kExchangeFloats = 2 * kFewQTileRows * kDims;
  static constexpr int kBarrierBytes = 8 * kWarps * kStages;
  static constexpr int kBytes = kWarps * kWarpBytes +
                                (kExchangeFloats + 2 * kWarps * kFewQTileRows) * sizeof(float) +
                                kBarrierBytes;
};

struct SplitProblem {
  CUtensorMap k, v;  // if TMA is used
  Problem p;
  int box_keys;  // keys per TMA box: 16 or 8
};

// Walks through a thread block's steps: the current q tile and, for this warp, its keys.
struct Cursor {
  int step;
  int tile_start, tile_end;  // steps of the current q tile
  int index, first_row;
  PlannedSequence sequence;

  __device__ explicit Cursor(const FewBlock& block)
      : step(block.begin),
        tile_start(block.tile_start),
        tile_end(block.tile_start + block.sequence.num_kv_tiles),
        index(block.index),
        first_row(block.first_row),
        sequence(block.sequence) {}

  __device__ void Next(const Problem& p, int end) {
    if (++step != tile_end || step == end) return;
    first_row += kFewQTileRows;
    if (first_row >= sequence.num_queries * p.group_size) {
      first_row = 0;
      do sequence = p.plan.sequences[++index];
      while (sequence.role != kFew);
    }
    tile_start = tile_end;
    tile_end += sequence.num_kv_tiles;
  }
  // This warp's first key of the step.
  __device__ int first_key() const {
    return (sequence.first_kv_tile + step - tile_start) * kFewKvTileKeys +
           static_cast<int>(threadIdx.x) / 32 * kSliceKeys;
  }
};

#if defined(FLASHXLA_HOPPER)

// Fills a warp's stages by TMA. Each stage has a barrier.
template <int kDims, bool kFp8>
struct BoxLoader {
  using Loader = KeyLoader<kDims, kFp8>;
  uint32_t barriers;

  __device__ void Init(int stages) const {
    if (threadIdx.x % 32 == 0) {
      for (int i = 0; i < stages; ++i) InitBarrier(barriers + 8 * i, 1);
      FenceProxy();
    }
    __syncwarp();
  }

  // Starts the loads of 16 keys and values. A box without any existing key is loaded from outside
  // the cache and so becomes zeros. A box with some existing keys is loaded whole.
  __device__ void Start(const SplitProblem& w, const KeyPlaces& places, int kv_head, int stage,
                        uint32_t to) const {
    constexpr int kColumnBytes = 128, kColumns = Loader::kRowBytes / kColumnBytes;
    const int lane = threadIdx.x & 31;
    const uint32_t barrier = barriers + 8 * stage;
    if (lane == 0) ArriveExpecting(barrier, Loader::kStageBytes);
    __syncwarp();
    // The lane of a box's first key loads the box.
    if (lane >= kSliceKeys || lane % w.box_keys != 0) return;
    const int block = places.there ? places.block : w.p.block_table.num_blocks;
    const uint32_t row = to + lane * kColumnBytes;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int x = c * kColumnBytes / Loader::kElementSize;
      const uint32_t place = row + c * kSliceKeys * kColumnBytes;
      LoadBox4(place, &w.k, barrier, x, kv_head, places.token, block);
      LoadBox4(place + Loader::kHalfBytes, &w.v, barrier, x, kv_head, places.token, block);
    }
  }

  // Zeroes the values of keys that do not exist: they may hold NaN, and 0 times NaN is not 0.
  __device__ static void ZeroValues(uint32_t mask, char* stage) {
    const int lane = threadIdx.x & 31;
    for (int i = lane; i < kSliceKeys * Loader::kChunks; i += 32) {
      const int row = i / Loader::kChunks;
      if ((mask >> row) & 1) continue;
      *reinterpret_cast<uint4*>(stage + Loader::kHalfBytes +
                                ChunkOffset<Loader::kChunks>(row, i % Loader::kChunks)) =
          make_uint4(0, 0, 0, 0);
    }
    FenceProxy();
    __syncwarp();
  }
};

#endif

// Combines the warps' parts of a q tile. Warp 0 gets the result.
template <typename T, int kDims, typename Out>
__device__ void CombineWarps(WarpAttention<T, kDims, Out>& part, float* exchange, float* row_maxes,
                             float* row_sums) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  part.ReduceRowSums();
  if (lane % 4 == 0) {
    for (int r = 0; r < 2; ++r) {
      row_maxes[warp * kFewQTileRows + lane / 4 + 8 * r] = part.row_max[r];
      row_sums[warp * kFewQTileRows + lane / 4 + 8 * r] = part.row_sum[r];
    }
  }
  __syncthreads();
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = lane / 4 + 8 * r;
    float row_max = -INFINITY, row_sum = 0.f;
    for (int w = 0; w < kWarps; ++w) row_max = fmaxf(row_max, row_maxes[w * kFewQTileRows + row]);
    const float base = row_max == -INFINITY ? 0.f : row_max;
    for (int w = 0; w < kWarps; ++w) {
      row_sum +=
          row_sums[w * kFewQTileRows + row] * Exp2(row_maxes[w * kFewQTileRows + row] - base);
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
    float* mine = exchange + (warp % width) * kFewQTileRows * kDims + lane;
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
__device__ void StorePartial(const WarpAttention<T, kDims, Out>& part, float* partial) {
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
      partial[Partial<kDims>::kRowMax + row] = part.row_max[r];
      partial[Partial<kDims>::kRowSum + row] = part.row_sum[r];
    }
  }
}

template <typename T, int kDims, bool kFp8, bool kTma>
__global__ void __launch_bounds__(32 * kWarps, kDims > 128 ? 1 : 2)
    SplitKernel(const __grid_constant__ SplitProblem w, const SplitWorkspace<kDims> workspace) {
#if !defined(FLASHXLA_HOPPER)
  if constexpr (kTma) return;
#endif
  using S = Shared<kDims, kFp8>;
  using Loader = KeyLoader<kDims, kFp8>;
  const Problem& p = w.p;
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
  float* row_sums = row_maxes + kWarps * kFewQTileRows;
  if (!kTma && p.head_size < kDims) {  // columns past head_size: see KeyLoader
    for (int i = threadIdx.x * 16; i < kWarps * S::kWarpBytes; i += blockDim.x * 16) {
      *reinterpret_cast<uint4*>(shared + i) = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
  }
#if defined(FLASHXLA_HOPPER)
  const BoxLoader<kDims, kFp8> boxes{SharedAddress(row_sums + kWarps * kFewQTileRows) +
                                     8 * S::kStages * warp};
  if constexpr (kTma) boxes.Init(S::kStages);
#endif

  Cursor load(block), compute(block);
  auto find = [&] {
    return load.step < end ? KeyPlaces::Find(p, load.sequence, load.index, load.first_key())
                           : KeyPlaces::None();
  };
  KeyPlaces places = find();
  uint64_t masks = 0;  // 16 bits per stage in flight, the oldest in the lowest bits
  auto start_load = [&](int stage) {
    places.Resolve(p);
    masks = masks >> 16 | uint64_t{places.mask} << (16 * (S::kStages - 1));
    if (load.step < end) {
      char* to = stages + stage * Loader::kStageBytes;
#if defined(FLASHXLA_HOPPER)
      if constexpr (kTma) boxes.Start(w, places, kv_head, stage, SharedAddress(to));
#endif
      if constexpr (!kTma) Loader::Start(p, places, kv_head, to);
      load.Next(p, end);
      places = find();
    }
    if constexpr (!kTma) CommitCopies();
  };
#pragma unroll 1
  for (int stage = 0; stage < S::kStages; ++stage) start_load(stage);

  WarpAttention<std::conditional_t<kFp8, __half, T>, kDims, T> part;
  int stage = 0;
  uint32_t parity = 0;
  while (true) {  // q tiles
    const int segment = compute.step;
    const int segment_end = min(compute.tile_end, end);
    part.Begin(p, compute.sequence, compute.index, kv_head, compute.first_row);
    for (int key = compute.first_key(); compute.step < segment_end;
         key += kFewKvTileKeys, ++compute.step) {
      char* keys = stages + stage * Loader::kStageBytes;
      const uint32_t mask = masks & 0xffffu;
#if defined(FLASHXLA_HOPPER)
      if constexpr (kTma) {
        WaitBarrier(boxes.barriers + 8 * stage, parity);
        if (mask != 0xffffu) boxes.ZeroValues(mask, keys);
      }
#endif
      if constexpr (!kTma) {
        WaitCopies<S::kStages - 1>();
        __syncwarp();
      }
      uint32_t address = SharedAddress(keys);
      if constexpr (kFp8) {
        WidenFp8<kDims>(keys, wide, p.kv_dtype == FLASHXLA_F8E5M2);
        __syncwarp();
        address = SharedAddress(wide);
      }
      part.Step(p, address, address + kSliceBytes<kDims>, key, mask);
      __syncwarp();
      start_load(stage);
      if (++stage == S::kStages) stage = 0, parity ^= 1;
    }

    CombineWarps(part, exchange, row_maxes, row_sums);
    const bool begins = segment == compute.tile_start, ends = segment_end == compute.tile_end;
    if (warp == 0) {
      if (begins && ends) {
        part.Store(p, compute.sequence, compute.index, kv_head, compute.first_row);
      } else {
        StorePartial(part, workspace.partial(kv_head, blockIdx.y, segment != block.begin));
      }
    }
    if (segment_end == end) {
      if (threadIdx.x == 0) {
        const int share =
            p.plan.few_blocks[0].end;  // steps per block; the first one's are complete
        workspace.tile(kv_head, blockIdx.y) = {
            begins && !ends ? (compute.tile_end - 1) / share - static_cast<int>(blockIdx.y) + 1 : 0,
            segment != block.begin,
            compute.index,
            compute.sequence.first_query,
            compute.sequence.num_queries,
            compute.first_row,
            {}};
      }
      return;
    }
    --compute.step;
    compute.Next(p, end);
  }
}

// Keys per TMA box; 0 if TMA cannot load the keys and values.
int SplitBoxKeys(const Problem& p) {
  const int64_t size = IsFp8(p.kv_dtype) ? 1 : 2;
  if (!LoadedImage().hopper || !p.kv_vectors || p.block_table.num_blocks == 0 ||
      p.block_table.block_size == 0 || DimsBucket(p.head_size) * size < 128) {
    return 0;
  }
  if (p.block_table.data == nullptr || p.block_table.block_size % 16 == 0) return 16;
  return p.block_table.block_size % 8 == 0 ? 8 : 0;
}

int64_t SharedBytes(const Problem& p) {
  int64_t bytes = 0;
  WithInstance(p.out_dtype, p.head_size, IsFp8(p.kv_dtype), [&](auto, auto dims, auto is_fp8) {
    bytes = Shared<decltype(dims)::value, decltype(is_fp8)::value>::kBytes;
  });
  return bytes;
}

const char* WhyNotSplit(const Facts& facts) {
  const Problem& p = facts.problem;
  if (const char* why = WhyNoTensorCores(p); why[0] != '\0') return why;
  if (!AreFewStepsCountable(facts, false)) return "the batch has too many keys for split-KV";
  if (DeviceAttribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, kHopper.shared) < SharedBytes(p)) {
    return "the GPU has too little shared memory";
  }
  return "";
}

int64_t WorkspaceBytes(const Problem& p) {
  constexpr int64_t kAlignment = 256;
  int64_t bytes = 0;
  WithInstance(p.out_dtype, p.head_size, false, [&](auto, auto dims, auto) {
    bytes =
        SplitWorkspace<decltype(dims)::value>::Bytes(int64_t{p.num_kv_heads} * p.num_few_blocks);
  });
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

flashxla_status LaunchSplit(const Problem& p, void* workspace, cudaStream_t stream) {
  SplitProblem w = {};
  w.p = p;
  w.box_keys = SplitBoxKeys(p);
  if (w.box_keys > 0) {
    const int columns = IsFp8(p.kv_dtype) ? 128 : 64;
    // Without TMA if it does not support the strides, such as 0.
    if (!MapCache(p, p.k, columns, w.box_keys, &w.k) ||
        !MapCache(p, p.v, columns, w.box_keys, &w.v)) {
      w.box_keys = 0;
    }
  }
  WithInstance(p.out_dtype, p.head_size, IsFp8(p.kv_dtype), [&](auto t, auto dims, auto is_fp8) {
    using T = typename decltype(t)::type;
    constexpr int kDims = decltype(dims)::value;
    constexpr bool kFp8 = decltype(is_fp8)::value;
    constexpr int kBytes = Shared<kDims, kFp8>::kBytes;
    const SplitWorkspace<kDims> parts(workspace, p.num_kv_heads, p.num_few_blocks);
    auto launch = [&](auto* kernel) {
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
      LaunchDependent(kernel, dim3(p.num_kv_heads, p.num_few_blocks), 32 * kWarps, kBytes, stream,
                      w, parts);
    };
    if constexpr (kDims > 64 || !kFp8) {
      if (w.box_keys > 0) return launch(SplitKernel<T, kDims, kFp8, true>);
    }
    launch(SplitKernel<T, kDims, kFp8, false>);
  });
  return FLASHXLA_OK;
}

}  // namespace

bool AreFewStepsCountable(const Facts& facts, bool any_length) {
  const Problem& p = facts.problem;
  const double sequences = static_cast<double>(facts.num_sequences);
  const double rows = static_cast<double>(p.num_tokens) * p.group_size;
  double q_tiles = rows / kFewQTileRows + sequences;
  if (!any_length) {
    const int64_t tiles_of_one = (MaxFewRows(p.group_size) + kFewQTileRows - 1) / kFewQTileRows;
    q_tiles = std::min(q_tiles, sequences * static_cast<double>(tiles_of_one));
  }
  return q_tiles * static_cast<double>(facts.capacity / kFewKvTileKeys + 2) < double{INT32_MAX};
}

int NumFewBlocks(const Problem& p) {
  const int per_multiprocessor = DimsBucket(p.head_size) > 128 ? 1 : 2;
  // Without a GPU, the most that any GPU gets: then the workspace is large enough for each.
  const int blocks =
      CurrentDevice() < 0 ? kMaxFewBlocks : NumMultiprocessors() * per_multiprocessor;
  return std::max(std::min(blocks, kMaxFewBlocks) / p.num_kv_heads, 1);
}

const Engine kSplitEngine = {"split",     "tensor cores, split-KV", kFew,
                             WhyNotSplit, WorkspaceBytes,           LaunchSplit};

}  // namespace flashxla::attention
