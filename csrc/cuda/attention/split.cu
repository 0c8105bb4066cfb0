// kSplit: sequences with few queries (decode). Reading the keys is all the work, so every
// multiprocessor reads an equal share of them.
#include <algorithm>
#include <type_traits>

#include "cuda/attention/dispatch.cuh"
#include "cuda/attention/engines.h"
#include "cuda/attention/hopper.cuh"
#include "cuda/attention/split.cuh"
#include "cuda/attention/tensor_map.h"
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
  static constexpr int kBarrierBytes = 8 * kWarps * kStages;
  static constexpr int kBytes = kWarps * kWarpBytes +
                                (kExchangeFloats + 2 * kWarps * kSplitRows) * sizeof(float) +
                                kBarrierBytes;
};

struct SplitProblem {
  CUtensorMap k, v;  // if TMA is used
  Problem p;
  int box_keys;  // keys of a TMA box: 16 or 8
};

// The steps of one warp in order: which tile of rows, which keys.
struct Cursor {
  int x;                     // in the line
  int tile_start, tile_end;  // the tile's steps
  int index, first_row;
  Sequence sequence;

  __device__ explicit Cursor(const SplitBlock& block)
      : x(block.begin),
        tile_start(block.tile_start),
        tile_end(block.tile_start + block.sequence.num_steps),
        index(block.index),
        first_row(block.first_row),
        sequence(block.sequence) {}

  __device__ void Next(const Problem& p, int end) {
    if (++x != tile_end || x == end) return;
    first_row += kSplitRows;
    if (first_row >= sequence.num_queries * p.group_size) {
      first_row = 0;
      do sequence = p.plan.sequences[++index];
      while (sequence.engine != kSplit);
    }
    tile_start = tile_end;
    tile_end += sequence.num_steps;
  }
  // This warp's first key of the step.
  __device__ int first_key() const {
    return (sequence.first_step + x - tile_start) * kSplitKeys +
           static_cast<int>(threadIdx.x) / 32 * kSliceKeys;
  }
};

#if defined(FLASHXLA_HOPPER)

// The stages of a warp, which TMA fills: a barrier each.
template <int kDims, bool kFp8>
struct BoxLoader {
  using Loader = KeyLoader<kDims, kFp8>;
  [[maybe_unused]] static constexpr int kColumnBytes = 128;
  [[maybe_unused]] static constexpr int kColumns = Loader::kRowBytes / kColumnBytes;
  uint32_t barriers;

  __device__ void Init(int stages) const {
    if (threadIdx.x % 32 == 0) {
      for (int i = 0; i < stages; ++i) InitBarrier(barriers + 8 * i, 1);
      FenceProxy();
    }
    __syncwarp();
  }

  // Starts the loads of 16 keys and values. A box of keys that do not exist becomes zeros: it lies
  // outside the cache. One of whose keys some do not exist is loaded whole.
  __device__ void Start(const SplitProblem& w, const KeyPlaces& places, int kv_head, int stage,
                        uint32_t to) const {
    const int lane = threadIdx.x & 31;
    const uint32_t barrier = barriers + 8 * stage;
    if (lane == 0) ArriveExpecting(barrier, Loader::kStageBytes);
    __syncwarp();
    // Lane l: box l of its keys, if it is the first of them.
    if (lane >= kSliceKeys || lane % w.box_keys != 0) return;
    const int block = places.there ? places.block : w.p.num_blocks;
    const uint32_t row = to + lane * kColumnBytes;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int x = c * kColumnBytes / Loader::kElementSize;
      const uint32_t place = row + c * kSliceKeys * kColumnBytes;
      LoadBox4(place, &w.k, barrier, x, kv_head, places.token, block);
      LoadBox4(place + Loader::kHalfBytes, &w.v, barrier, x, kv_head, places.token, block);
    }
  }

  // Values of keys that do not exist may be anything, and 0 times it is not always 0.
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

// Adds up the warps' parts of a tile. Warp 0 then holds the whole.
template <typename T, int kDims, typename Out>
__device__ void Combine(WarpAttention<T, kDims, Out>& part, float* exchange, float* tops,
                        float* sums) {
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
      partial[kSplitRows * kDims + row] = part.top[r];
      partial[kSplitRows * (kDims + 1) + row] = part.sum[r];
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
  AllowNext();
  AwaitPrevious();
  const SplitBlock block = p.plan.split_blocks[blockIdx.y];
  const int end = block.end;
  if (block.begin >= end) {
    if (threadIdx.x == 0) workspace.merge(kv_head, blockIdx.y).num_parts = 0;
    return;
  }

  extern __shared__ __align__(1024) char shared[];
  char* stages = shared + warp * S::kWarpBytes;
  char* wide = stages + S::kStages * Loader::kStageBytes;
  float* exchange = reinterpret_cast<float*>(shared + kWarps * S::kWarpBytes);
  float* tops = exchange + S::kExchangeFloats;
  float* sums = tops + kWarps * kSplitRows;
  if (!kTma && p.head_size < kDims) {  // columns behind head_size: see KeyLoader
    for (int i = threadIdx.x * 16; i < kWarps * S::kWarpBytes; i += blockDim.x * 16) {
      *reinterpret_cast<uint4*>(shared + i) = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
  }
#if defined(FLASHXLA_HOPPER)
  const BoxLoader<kDims, kFp8> boxes{SharedAddress(sums + kWarps * kSplitRows) +
                                     8 * S::kStages * warp};
  if constexpr (kTma) boxes.Init(S::kStages);
#endif

  Cursor load(block), compute(block);
  auto find = [&] {
    return load.x < end ? KeyPlaces::Find(p, load.sequence, load.index, load.first_key())
                        : KeyPlaces::None();
  };
  KeyPlaces places = find();
  uint64_t masks = 0;  // 16 bits a stage in flight, the oldest lowest
  auto start_load = [&](int stage) {
    places.Resolve(p);
    masks = masks >> 16 | uint64_t{places.mask} << (16 * (S::kStages - 1));
    if (load.x < end) {
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
  while (true) {  // tiles of rows
    const int segment = compute.x;
    const int segment_end = min(compute.tile_end, end);
    part.Begin(p, compute.sequence, compute.index, kv_head, compute.first_row);
    for (int key = compute.first_key(); compute.x < segment_end; key += kSplitKeys, ++compute.x) {
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

    Combine(part, exchange, tops, sums);
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
        const int share = p.plan.split_blocks[0].end;  // the first block has a whole one
        workspace.merge(kv_head, blockIdx.y) = {
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
    --compute.x;
    compute.Next(p, end);
  }
}

// Keys of a TMA box; 0: keys and values cannot be loaded that way.
int SplitBoxKeys(const Problem& p) {
  const int64_t size = IsFp8(p.kv_dtype) ? 1 : 2;
  if (!LoadedImage().hopper || !p.kv_vectors || p.num_blocks == 0 || p.block_size == 0 ||
      DimsBucket(p.head_size) * size < 128) {
    return 0;
  }
  if (p.block_table == nullptr || p.block_size % 16 == 0) return 16;
  return p.block_size % 8 == 0 ? 8 : 0;
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

void LaunchSplit(const Problem& p, int64_t engines, float* workspace, cudaStream_t stream) {
  SplitProblem w = {};
  w.p = p;
  w.box_keys = SplitBoxKeys(p);
  if (w.box_keys > 0) {
    const int columns = IsFp8(p.kv_dtype) ? 128 : 64;
    // Strides that TMA cannot take, such as 0, go without it.
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
    const int blocks = SplitBlocksOf(engines);
    const SplitWorkspace<kDims> parts(workspace, p.num_kv_heads, blocks);
    auto launch = [&](auto* kernel) {
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
      LaunchEarly(kernel, dim3(p.num_kv_heads, blocks), 32 * kWarps, kBytes, stream, w, parts);
    };
    if constexpr (kDims > 64 || !kFp8) {
      if (w.box_keys > 0) return launch(SplitKernel<T, kDims, kFp8, true>);
    }
    launch(SplitKernel<T, kDims, kFp8, false>);
  });
}

}  // namespace flashxla::attention
