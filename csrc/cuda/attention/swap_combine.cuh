// How swap's blocks combine their partial results without another kernel: the block that has a q
// tile's last part waits for the others and combines.
//
// Each partial result has a flag in the workspace. A block waits when all of its steps are done,
// for blocks that start before it and wait for none after them.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_COMBINE_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_COMBINE_CUH_

#include "cuda/attention/combine.cuh"
#include "cuda/attention/flag.cuh"
#include "cuda/attention/plan_sequences.cuh"
#include "cuda/attention/swap_shared.cuh"

namespace flashxla::attention {

#if defined(FLASHXLA_HOPPER)

// Waits until the other parts of a q tile are there, the last of which this block has stored. The
// consumer warps must call it together.
template <typename S>
__device__ void AwaitParts(const SwapProblem& w, const SplitWorkspace& workspace, int kv_head,
                           const SplitTile& tile, int first_block) {
  for (int n = threadIdx.x; n < tile.num_parts - 1; n += S::kConsumerThreads) {
    AwaitFlag(workspace.flag(kv_head, first_block + n, n == 0 && tile.back), w.tag);
  }
  SyncNamed(kSwapConsumers, S::kConsumerThreads);
}

// Combines the q tile whose last part is this block's, if there is one. The consumer warps must
// call it after they stored that part. The parts come into shared memory, where the keys were: a
// warp has a share of that, and takes rows in turn with the others.
//
// This is short, and the producer warp, which is done before them, calls it, too, and goes the same
// way without a part. So the instructions are there when they are needed: where other kernels ran
// since the last call, they have to come from memory.
template <typename S>
__device__ void CombineParts(const SwapProblem& w, const SwapShared<S>& shared,
                             const SplitWorkspace& workspace, int kv_head, int warp,
                             const SplitTile& tile) {
  using Row = CombinedRow<S::kValueDims>;
  // A slot has a part of a row: the values, and the four neighbouring rows' largest scores and
  // sums.
  constexpr int kValueBytes = S::kValueDims * 4, kSumBytes = 32;
  constexpr int kWarps = S::kConsumerWarps;
  constexpr int kRoom = S::kStages * S::kStageBytes / kWarps;
  constexpr int kSlots = kRoom / (kValueBytes + kSumBytes);
  static_assert(kSlots > 0);
  const int lane = threadIdx.x & 31, num_parts = tile.num_parts;
  const int first_block = static_cast<int>(blockIdx.y) - num_parts + 1;
  if (num_parts > 0) AwaitParts<S>(w, workspace, kv_head, tile, first_block);
  // Without a part one row is walked through.
  const int rows =
      num_parts > 0 ? min(tile.num_queries * w.p.group_size - tile.first_row, workspace.shape.rows)
                    : 1;
  if (num_parts > 0 && warp >= rows) return;
  const uint32_t values = shared.stage(0) + warp * kRoom, sums = values + kSlots * kValueBytes;
  auto part = [&](int n) {
    return workspace.partial(kv_head, first_block + n, n == 0 && tile.back);
  };
  // All parts of several rows at once, or some of one row.
  const int most_parts = max(min(num_parts, min(kSlots, 32)), 1);
  const int most_rows = num_parts > most_parts ? 1 : max(RoughQuotient(kSlots, most_parts), 1);
  Row combined;
  int row = warp;
#pragma unroll 1
  do {
    const int num_rows = min((rows - row + kWarps - 1) / kWarps, most_rows);
    int base = 0;
#pragma unroll 1
    do {
      const int count = min(num_parts - base, most_parts);
      int i = 0;
#pragma unroll 1
      do {  // copies the parts of a row
        const int r = row + i * kWarps, first = i * count;
        if (lane < count) {
          const float* from = part(base + lane) + r / 4 * 4;
          const uint32_t to = sums + (first + lane) * kSumBytes;
          CopyAsync16(to, from + workspace.shape.row_max(), true);
          CopyAsync16(to + 16, from + workspace.shape.row_sum(), true);
        }
        const float* from = part(base) + r * S::kValueDims + lane * 4;
#pragma unroll 4
        for (int n = 0; n < count; ++n) {
          const uint32_t to = values + (first + n) * kValueBytes + lane * 16;
#pragma unroll
          for (int chunk = 0; chunk < S::kValueDims / 4; chunk += 32) {
            if (chunk + lane < S::kValueDims / 4) {
              CopyAsync16(to + chunk * 16, from + chunk * 4, true);
            }
          }
          // Each block has two places, and only the first part can be in the second one.
          from += (base + n == 0 && tile.back ? 1 : 2) * workspace.shape.floats();
        }
      } while (++i < num_rows);
      CommitCopies();
      WaitCopies<0>();
      __syncwarp();
      i = 0;
#pragma unroll 1
      do {  // adds them
        const int r = row + i * kWarps, first = i * count;
        if (base == 0) combined = Row();
        float part_max = -INFINITY, part_sum = 0.f;
        if (lane < count) {
          const uint32_t from = sums + (first + lane) * kSumBytes + r % 4 * 4;
          part_max = LoadShared<float>(from);
          part_sum = LoadShared<float>(from + 16);
        }
        const float factor = combined.AddSums(part_max, part_sum);
#pragma unroll 4
        for (int n = 0; n < count; ++n) {
          typename Row::Values x;
#pragma unroll
          for (int v = 0; v < Row::kVectors; ++v) {
            x.vectors[v] = LoadShared<typename Row::Vector>(values + (first + n) * kValueBytes +
                                                            Row::Dim(v) * 4);
          }
          combined.AddValues(x, __shfl_sync(kAllLanes, factor, n));
        }
        if (num_parts > 0 && base + count == num_parts) combined.Store(w.p, kv_head, tile, r);
      } while (++i < num_rows);
      __syncwarp();
      base += count;
    } while (base < num_parts);
  } while ((row += most_rows * kWarps) < rows);
}

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_COMBINE_CUH_
