// large: 16-bit queries and keys with head sizes above 128, and fp8 ones with head sizes above 256,
// on all GPUs since Ampere. large_split: few queries, with head sizes above 256, by split-KV.
#include "common/tensor_view.h"
#include "cuda/attention/dispatch.cuh"
#include "cuda/attention/engines.h"
#include "cuda/attention/key_copies.h"
#include "cuda/attention/large_cluster.h"
#include "cuda/attention/large_tile.cuh"
#include "cuda/attention/tensor_map.h"

namespace flashxla::attention {
namespace {

constexpr int kMostDims = static_cast<int>(kMaxHeadSize);
// Thread blocks of a multiprocessor.
constexpr int BlocksEach(int dims) { return dims > kMaxUsualHeadSize ? 1 : 2; }

template <typename T, int kDims, int kKeys, bool kFp8>
__global__ void __launch_bounds__(kLargeThreads, BlocksEach(kDims))
    LargeKernel(const __grid_constant__ Problem p) {
  extern __shared__ __align__(1024) char memory[];
  LargeTile<T, kDims, kKeys, kFp8> rows(p, memory);
  TriggerNext();
  WaitForPrevious();
  ForEachRestSegment<kKeys>(p, kRestQTileRows, blockIdx.x, gridDim.x,
                            [&](const LargeSegment& segment) { rows.Compute(segment); });
}

template <typename T, int kKeys, bool kFp8>
__global__ void __launch_bounds__(kLargeThreads, 1)
    LargeSplitKernel(const __grid_constant__ Problem p, const SplitWorkspace workspace) {
  static_assert(kFewKvTileKeys % kKeys == 0);
  extern __shared__ __align__(1024) char memory[];
  LargeTile<T, kMostDims, kKeys, kFp8> rows(p, memory);
  TriggerNext();
  WaitForPrevious();
  const SplitTile begun = ForEachSplitSegment(
      p, workspace, blockIdx.x, blockIdx.y,
      [&](const LargeSegment& segment) { rows.Compute(segment, &workspace.shape); });
  if (threadIdx.x == 0) workspace.tile(blockIdx.x, blockIdx.y) = begun;
}

const char* WhyNotProblem(const Problem& p) {
  if (const char* why = WhyNot16BitDtypes(p); why[0] != '\0') return why;
  if (p.LargerHeadSize() <= 128) return "head sizes are at most 128";
  if (!p.kv_vectors() || p.q_unit != 16) {
    return "strides, addresses or head sizes are not multiples of 16 bytes";
  }
  const bool usual = !HasLargeHeads(p);
  if (usual && IsFp8(p.kv_dtype)) return "keys are fp8, in heads of at most 256";
  const int bytes =
      usual ? sizeof(LargeShared<kMaxUsualHeadSize, 32>) : sizeof(LargeShared<kMostDims, 32>);
  return HasSharedMemory(bytes) ? "" : "the GPU has too little shared memory";
}

// The problem on copies of the keys, if it has any that clusters take.
Problem OnCopies(const Problem& p) { return LargeCopiesKeys(p) ? OnKeyCopies(p) : p; }

const char* WhyNotLarge(const Facts& facts) { return WhyNotProblem(OnCopies(facts.problem)); }

const char* WhyNotLargeSplit(const Facts& facts) {
  // Smaller heads have engines of their own, which are faster.
  if (!HasLargeHeads(facts.problem)) return "head sizes are at most 256";
  if (const char* why = WhyNotProblem(facts.problem); why[0] != '\0') return why;
  return AreFewStepsCountable(facts, false) ? "" : "the batch has too many keys for split-KV";
}

// Calls body as WithInstance does, and with integral_constant<int, kKeys>: the most keys for which
// there is room.
template <typename Sizes, typename Body>
void WithTile(const Problem& p, Body&& body) {
  WithInstance<Sizes>(p, [&](auto t, auto dims, auto fp8) {
    constexpr int kDims = decltype(dims)::value;
    if constexpr (kDims > kMaxUsualHeadSize || !decltype(fp8)::value) {  // see WhyNotLarge
      HasSharedMemory(sizeof(LargeShared<kDims, 64>))
          ? body(t, dims, fp8, std::integral_constant<int, 64>{})
          : body(t, dims, fp8, std::integral_constant<int, 32>{});
    }
  });
}

int64_t WorkspaceBytes(const Problem& p) { return LargeCopiesKeys(p) ? KeyCopiesBytes(p) : 0; }

// Works on copies, but for sequences of which a page is missing: general takes these.
flashxla_status LaunchOnCopies(const Problem& p, void* memory, cudaStream_t stream) {
  const Problem copied = MakeKeyCopies(p, kRest, memory, stream);
  const flashxla_status status = LaunchLargeClusters(copied, stream);
  if (status != FLASHXLA_OK || copied.block_table.data == nullptr) return status;
  Problem left = p;
  left.served = copied.block_table.data;
  return kGeneralEngine.launch(left, nullptr, stream);
}

flashxla_status LaunchLarge(const Problem& p, void* workspace, cudaStream_t stream) {
  if (LargeCopiesKeys(p)) return LaunchOnCopies(p, workspace, stream);
  if (SuitsClusters(p)) return LaunchLargeClusters(p, stream);
  WithTile<HeadSizes<kMaxUsualHeadSize, kMostDims>>(p, [&](auto t, auto dims, auto fp8, auto keys) {
    constexpr int kDims = decltype(dims)::value, kKeys = decltype(keys)::value;
    auto* kernel = LargeKernel<typename decltype(t)::type, kDims, kKeys, decltype(fp8)::value>;
    LaunchDependent(kernel, NumRestBlocks(p, BlocksEach(kDims)), kLargeThreads,
                    sizeof(LargeShared<kDims, kKeys>), stream, p);
  });
  return FLASHXLA_OK;
}

flashxla_status LaunchLargeSplit(const Problem& p, void* workspace, cudaStream_t stream) {
  if (p.few.q_tile_rows == kClusterQTileRows) return LaunchLargeSplitClusters(p, workspace, stream);
  WithTile<HeadSizes<kMostDims>>(p, [&](auto t, auto dims, auto fp8, auto keys) {
    constexpr int kKeys = decltype(keys)::value;
    auto* kernel = LargeSplitKernel<typename decltype(t)::type, kKeys, decltype(fp8)::value>;
    LaunchDependent(kernel, dim3(p.num_kv_heads, p.few.num_blocks), kLargeThreads,
                    sizeof(LargeShared<decltype(dims)::value, kKeys>), stream, p,
                    SplitWorkspace(p, workspace));
  });
  return FLASHXLA_OK;
}

}  // namespace

bool LargeCopiesKeys(const Problem& p) { return CopiesKeys(p) && SuitsClusters(OnKeyCopies(p)); }

int LargeQTileRows(const Problem& p) {
  return SuitsClusters(OnCopies(p)) ? kClusterQTileRows : kRestQTileRows;
}

int LargeSplitQTileRows(const Problem& p) {
  const bool many = MaxFewRows(p.group_size) > kRestQTileRows;
  return many && SuitsClusters(p) ? kClusterQTileRows : kRestQTileRows;
}

const Engine kLargeEngine = {
    "large", "tensor cores, head sizes above 128", kRest, WhyNotLarge, WorkspaceBytes, LaunchLarge};
const Engine kLargeSplitEngine = {"large_split",
                                  "tensor cores, head sizes above 256, split-KV",
                                  kFew,
                                  WhyNotLargeSplit,
                                  SplitWorkspaceBytes,
                                  LaunchLargeSplit};

}  // namespace flashxla::attention
