// wide's producer warps where the page size is no multiple of 8 keys. TMA takes some 30 cycles for
// a box, however small, so here threads copy the keys, row by row.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_GATHER_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_GATHER_CUH_

#include "cuda/attention/mma.cuh"
#include "cuda/attention/warp.cuh"
#include "cuda/attention/wide_load.cuh"

namespace flashxla::attention {

#if defined(FLASHXLA_HOPPER)

// A warp's rows of kv tiles. Each lane knows where one row lies, and copies a vector of each.
template <typename S>
struct WideRows {
  static constexpr int kCount = S::kKeys / kGatheringWarps;
  static constexpr int kVectors = S::kBlocks * kWideRowBytes / 16;  // of a row
  static constexpr int kAtOnce = 32 / kVectors;                     // rows
  static_assert(kCount % (4 * kAtOnce) == 0);
  const Problem& p;
  const ManyTile& tile;
  int first_row;  // in the kv tile

  __device__ WideRows(const Problem& problem, const ManyTile& q_tile)
      : p(problem), tile(q_tile), first_row(threadIdx.x / 32 * kCount) {}

  // The block and token of the lane's row in kv tile n; a block of -1 if that key does not exist.
  // Only starts to load the block.
  __device__ int2 Locate(int n) const {
    const int key = n * S::kKeys + first_row + (threadIdx.x & 31) % kCount;
    if (key < 0 || key >= tile.s.num_keys) return make_int2(-1, 0);
    const int page = p.PageOf(key);
    return make_int2(Entry(p.block_table, tile.index, page), key - page * p.block_table.block_size);
  }

  // Starts to copy the rows to a stage; zeros where no key is.
  __device__ void Copy(const Cache& cache, int kv_head, int2 place, uint32_t stage) const {
    __ballot_sync(kAllLanes, place.x < 0) == 0 ? Copy<true>(cache, kv_head, place, stage)
                                               : Copy<false>(cache, kv_head, place, stage);
    CommitCopies();
  }

 private:
  // kAllExist: all rows do. Then little is done for each copy, since these warps are short of time.
  template <bool kAllExist>
  __device__ void Copy(const Cache& cache, int kv_head, int2 place, uint32_t stage) const {
    const int lane = threadIdx.x & 31, vector = lane % kVectors, row = first_row + lane / kVectors;
    // In units of 16 bytes, in which offsets fit 32 bits (kv_near).
    auto unit = [](int64_t stride) { return static_cast<uint32_t>(stride / 8); };
    const uint32_t row_offset = place.x * unit(cache.stride_block) +
                                place.y * unit(cache.stride_token) +
                                kv_head * unit(cache.stride_head);
    const char* from = cache.data + vector * 16;
    const uint32_t to =
        stage + (vector / 8 * S::kKeys + row) * kWideRowBytes + (vector % 8 ^ row % 8) * 16;
    const bool inside = vector * 8 < p.head_size, idle = lane >= kAtOnce * kVectors;
    constexpr int kTogether = kAllExist ? 4 : 1;  // copies whose places are asked for together
#pragma unroll(kAllExist ? kCount / kAtOnce / kTogether : 1)
    for (int first = 0; first < kCount; first += kTogether * kAtOnce) {
      uint32_t offset[kTogether];
      bool exists[kTogether];
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        const int i = first + n * kAtOnce + lane / kVectors;
        offset[n] = __shfl_sync(kAllLanes, row_offset, i);
        exists[n] = kAllExist || __shfl_sync(kAllLanes, place.x, i) >= 0;
      }
      if (idle) continue;
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        const int i = first + n * kAtOnce;
        // Row i of these is at row % 8 ^ i % 8 of 8: warps begin at multiples of 4.
        CopyAsync16((to ^ i % 8 * 16) + i * kWideRowBytes, from + uint64_t{offset[n]} * 16,
                    exists[n] && inside);
      }
    }
  }
};

template <typename S>
__device__ void GatherKeys(const WideProblem& w, const WideShared<S>& shared, int items) {
  const Problem& p = w.p;
  PipelineState<S::kQueryStages> queries;
  PipelineState<S::kStages> state;
  // The copies of all lanes have arrived; also for the matrix instructions.
  auto finish = [](uint32_t full) {
    FenceProxy();
    Release(full);
  };
  // Two stages arrive while a third one is asked for.
  uint32_t older = 0, newer = 0;
  auto follow = [&](uint32_t full) {
    WaitCopies<2>();
    if (older != 0) finish(older);
    older = newer, newer = full;
  };
  WideSchedule<S> schedule(shared, items);
  WideTiles<S> tiles(shared);
  if (threadIdx.x < 32) schedule.HandOut(w);
  for (ManyTile tile; tiles.Next(&tile); tiles.Done()) {
    if (threadIdx.x < 32) {
      LoadQueryTile(w, shared, tile, queries);
      schedule.HandOut(w);
    }
    const WideRows<S> rows(p, tile);
    const int kv_head = tile.kv_head;
    const int first = tile.begin / S::kKeys;
    int n = (tile.end + S::kKeys - 1) / S::kKeys - 1;
    int2 place = rows.Locate(n);
    for (; n >= first; --n) {
      const int2 next = rows.Locate(n - 1);  // early, to hide the block table's latency
      WaitBarrier(shared.keys_empty(state.stage), state.parity ^ 1);
      rows.Copy(p.k, kv_head, place, shared.keys(state.stage));
      follow(shared.keys_full(state.stage));
      WaitBarrier(shared.values_empty(state.stage), state.parity ^ 1);
      rows.Copy(p.v, kv_head, place, shared.values(state.stage));
      follow(shared.values_full(state.stage));
      state.Next();
      place = next;
    }
    WaitCopies<0>();
    if (older != 0) finish(older);
    if (newer != 0) finish(newer);
    older = newer = 0;
  }
}

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_GATHER_CUH_
