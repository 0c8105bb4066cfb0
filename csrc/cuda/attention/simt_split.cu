// split32: sequences with few float32 queries (decode), by split-KV on CUDA cores. As in split.cu
// all multiprocessors get equal shares of the batch's keys, by the same plan, and combine.cu
// combines.
#include <algorithm>
#include <type_traits>

#include "common/tensor_view.h"
#include "cuda/attention/dispatch.cuh"
#include "cuda/attention/engines.h"
#include "cuda/attention/simt_rows.cuh"
#include "cuda/attention/split.cuh"
#include "cuda/launch.h"

namespace flashxla::attention {
namespace {

constexpr int kWarps = 4;
// A warp has 16 of a step's keys, as KeyPlaces finds them, and takes them in two slices.
constexpr int kSlices = kSliceKeys / kSimtSliceKeys;
static_assert(kFewKvTileKeys == kWarps * kSliceKeys && kSlices == 2);

template <int kDims, bool kFp8>
struct Layout {
  // Slices on their way to a warp. Bytes are few: more slices are needed to keep memory busy.
  static constexpr int kStages = kFp8 ? 6 : kDims > 128 ? 2 : 3;
  static constexpr int kWarpBytes = kStages * SimtLoader<kDims, kFp8>::kStageBytes;
  static constexpr int kBytes = kWarps * kWarpBytes + int{sizeof(SimtRowsShared<kDims, kWarps>)};
  static_assert(kStages * kSimtSliceKeys <= 64);
};

template <int kDims, bool kFp8>
__global__ void __launch_bounds__(32 * kWarps, FewBlocksEach(kDims, kSimtRows))
    SimtSplitKernel(const __grid_constant__ Problem p, const SplitWorkspace workspace) {
  using L = Layout<kDims, kFp8>;
  using Loader = SimtLoader<kDims, kFp8>;
  using Rows = SimtRows<kDims, kWarps, kFp8>;
  const int kv_head = blockIdx.x, warp = threadIdx.x / 32;
  TriggerNext();
  WaitForPrevious();
  const FewBlock block = p.plan.few_blocks[blockIdx.y];
  const int end = block.end;
  if (block.begin >= end) {
    if (threadIdx.x == 0) workspace.tile(kv_head, blockIdx.y).num_parts = 0;
    return;
  }

  extern __shared__ __align__(16) char memory[];
  char* stages = memory + warp * L::kWarpBytes;
  auto& shared = *reinterpret_cast<typename Rows::Shared*>(memory + kWarps * L::kWarpBytes);
  if (p.LacksDims(kDims)) {  // columns past head_size: see SimtLoader
    for (int i = threadIdx.x * 16; i < kWarps * L::kWarpBytes; i += blockDim.x * 16) {
      *reinterpret_cast<uint4*>(memory + i) = make_uint4(0, 0, 0, 0);
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
  uint64_t masks = 0;  // 8 bits per stage in flight, the oldest in the lowest bits
  int load_slice = 0;
  auto start_load = [&](int stage) {
    const int first = load_slice * kSimtSliceKeys;
    if (load_slice == 0) places.Resolve(p);
    masks = masks >> kSimtSliceKeys | uint64_t{places.mask >> first & 0xffu}
                                          << (kSimtSliceKeys * (L::kStages - 1));
    if (load.step < end) {
      Loader::Start(p, places, first, kv_head, stages + stage * Loader::kStageBytes);
      if (load_slice == kSlices - 1) {
        load.Next(p);
        places = find();
      }
    }
    load_slice ^= 1;
    CommitCopies();
  };
#pragma unroll 1
  for (int stage = 0; stage < L::kStages; ++stage) start_load(stage);

  Rows rows;
  int stage = 0;
  while (true) {  // q tiles
    const int segment = compute.step;
    const int segment_end = min(compute.tile_end, end);
    rows.Begin(p, compute.sequence, compute.index, kv_head, compute.first_row, shared);
    int key = compute.first_key() + warp * kSliceKeys;
#pragma unroll 1
    for (int left = (segment_end - segment) * kSlices; left > 0; --left) {
      const uint32_t mask = masks & 0xffu;
      WaitCopies<L::kStages - 1>();
      __syncwarp();
      if (mask != 0) rows.Step(p, stages + stage * Loader::kStageBytes, key, mask, shared);
      __syncwarp();
      start_load(stage);
      if (++stage == L::kStages) stage = 0;
      // The second slice of these 16 keys, or the first slice 64 keys on.
      key += left % kSlices == 0 ? kSimtSliceKeys : kFewKvTileKeys - kSimtSliceKeys;
    }
    compute.step = segment_end;

    const bool whole = segment == compute.tile_start && segment_end == compute.tile_end;
    rows.Store(p, workspace.shape,
               whole ? nullptr : workspace.partial(kv_head, blockIdx.y, segment != block.begin),
               shared);
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

template <typename Body>
void WithSimtInstance(const Problem& p, Body&& body) {
  WithInstance(FLASHXLA_BF16, p.LargerHeadSize(), IsFp8(p.kv_dtype),
               [&](auto, auto dims, auto is_fp8) { body(dims, is_fp8); });
}

const char* WhyNotSimtSplit(const Facts& facts) {
  const Problem& p = facts.problem;
  if (const char* why = WhyNotUsual(p); why[0] != '\0') return why;
  if (p.q_dtype != FLASHXLA_F32) return "queries are not float32";
  if (!AreFewStepsCountable(facts, false)) return "the batch has too many keys for split-KV";
  int bytes = 0;
  WithSimtInstance(p, [&](auto dims, auto is_fp8) {
    bytes = Layout<decltype(dims)::value, decltype(is_fp8)::value>::kBytes;
  });
  return HasSharedMemory(bytes) ? "" : "the GPU has too little shared memory";
}

flashxla_status LaunchSimtSplit(const Problem& p, void* workspace, cudaStream_t stream) {
  WithSimtInstance(p, [&](auto dims, auto is_fp8) {
    constexpr int kDims = decltype(dims)::value;
    constexpr bool kFp8 = decltype(is_fp8)::value;
    constexpr int kBytes = Layout<kDims, kFp8>::kBytes;
    auto* kernel = SimtSplitKernel<kDims, kFp8>;
    LaunchDependent(kernel, dim3(p.num_kv_heads, p.few.num_blocks), 32 * kWarps, kBytes, stream, p,
                    SplitWorkspace(p, workspace));
  });
  return FLASHXLA_OK;
}

}  // namespace

const Engine kSimtSplitEngine = {"split32",       "CUDA cores, split-KV", kFew,
                                 WhyNotSimtSplit, SplitWorkspaceBytes,    LaunchSimtSplit};

}  // namespace flashxla::attention
