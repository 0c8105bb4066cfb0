// wide's producer warps where the page size is no multiple of 8 keys, or heads are odd
// (wide_odd.cuh). TMA takes some 30 cycles for a box, however small, so here all of these warps
// copy keys, row by row.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_GATHER_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_GATHER_CUH_

#include <type_traits>

#include "cuda/attention/mma.cuh"
#include "cuda/attention/warp.cuh"
#include "cuda/attention/wide_load.cuh"

namespace flashxla::attention {

#if defined(FLASHXLA_HOPPER)

// Rows of kv tiles as a warp copies them, so many at a time. Each lane knows where one row lies,
// and copies a vector of each. Rows of e4m3 stay as they are in memory.
template <typename S, bool kValues = false>
struct WideRows {
  static constexpr int kElements = S::kDirect ? 8 : 16;  // of a vector of 16 bytes
  static constexpr int kBlocks = kValues ? S::kValueBlocks : S::kBlocks;
  static constexpr int kVectors = (S::kDirect ? kBlocks : S::kRawBlocks) * kWideRowBytes / 16;
  static constexpr int kCount = S::kKeys / (S::kProducerThreads / 32);
  static constexpr int kAtOnce = 32 / kVectors;  // rows that the lanes copy together
  static_assert(kCount % (4 * kAtOnce) == 0);
  const Problem& p;
  const ManyTile& tile;

  // The block and token of the lane's row, from `first_row` of kv tile n on; a block of -1 if that
  // key does not exist. To ask for that here waits for the block table, but to ask at each copy, of
  // keys and of values, takes longer.
  __device__ int2 Locate(int n, int first_row) const {
    const int key = n * S::kKeys + first_row + (threadIdx.x & 31) % kCount;
    if (key < 0 || key >= tile.s.num_keys) return make_int2(-1, 0);
    if (S::kOddHeads && p.block_table.data == nullptr) return make_int2(0, tile.s.key_row + key);
    const int page = p.PageOf(key), block = Entry(p.block_table, tile.index, page);
    // Of keys that no row sees the page may be unsound: see CheckTables.
    return make_int2(IsSound(p.block_table, block) ? block : -1,
                     key - page * p.block_table.block_size);
  }

  // Starts to copy the rows to a stage, from its row `first_row` on; zeros where no key is.
  __device__ void Copy(const Cache& cache, int2 place, int first_row, uint32_t stage) const {
    if constexpr (S::kOddHeads) {
      if (p.kv_unit == 8) return CopyUnits<8>(cache, place, first_row, stage);
      if (p.kv_unit == 4) return CopyUnits<4>(cache, place, first_row, stage);
    }
    CopyUnits<16>(cache, place, first_row, stage);
  }

 private:
  // kUnit: bytes that are copied at a time.
  template <int kUnit>
  __device__ void CopyUnits(const Cache& cache, int2 place, int first_row, uint32_t stage) const {
    __ballot_sync(kAllLanes, place.x < 0) == 0 ? Copy<kUnit, true>(cache, place, first_row, stage)
                                               : Copy<kUnit, false>(cache, place, first_row, stage);
  }

  // kAllExist: all rows do. Then little is done for each copy, since these warps are short of time.
  template <int kUnit, bool kAllExist>
  __device__ void Copy(const Cache& cache, int2 place, int first_row, uint32_t stage) const {
    const int lane = threadIdx.x & 31, vector = lane % kVectors, row = first_row + lane / kVectors;
    // In units of so many bytes, in which offsets fit 32 bits (kv_near).
    constexpr int kUnits = 16 / kUnit, kOfUnit = kElements / kUnits;
    auto unit = [](int64_t stride) { return static_cast<uint32_t>(stride / kOfUnit); };
    const uint32_t row_offset = place.x * unit(cache.stride_block) +
                                place.y * unit(cache.stride_token) +
                                tile.kv_head * unit(cache.stride_head);
    uint64_t from = reinterpret_cast<uint64_t>(cache.data) + vector * 16;
    // Else ptxas adds it up anew for each copy, in three instructions instead of one.
    asm volatile("" : "+l"(from));
    const uint32_t to =
        stage + (vector / 8 * S::kKeys + row) * kWideRowBytes + (vector % 8 ^ row % 8) * 16;
    const int columns = cache.head_size - vector * kElements;
    const bool idle = lane >= kAtOnce * kVectors;
    constexpr int kTogether = kAllExist ? 4 : 1;  // copies whose places are asked for together
#pragma unroll(kAllExist ? kCount / kAtOnce / kTogether : 1)
    for (int first = 0; first < kCount; first += kTogether * kAtOnce) {
      uint64_t at[kTogether];
      bool exists[kTogether];
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        const int i = first + n * kAtOnce + lane / kVectors;
        at[n] = from + uint64_t{__shfl_sync(kAllLanes, row_offset, i)} * kUnit;
        exists[n] = kAllExist || __shfl_sync(kAllLanes, place.x, i) >= 0;
      }
      if (idle) continue;
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        const int i = first + n * kAtOnce;
        // Row i of these is at row % 8 ^ i % 8 of 8: warps begin at multiples of 4.
        const uint32_t row_to = (to ^ i % 8 * 16) + i * kWideRowBytes;
        const void* row_from = reinterpret_cast<const void*>(at[n]);
        auto copy = [&](auto unit) {
          constexpr int kNumber = decltype(unit)::value;
          if constexpr (kNumber < kUnits) {
            CopyAsync<kUnit, kNumber * kUnit>(row_to, row_from,
                                              exists[n] && columns > kNumber * kOfUnit);
          }
        };
        copy(std::integral_constant<int, 0>{}), copy(std::integral_constant<int, 1>{});
        copy(std::integral_constant<int, 2>{}), copy(std::integral_constant<int, 3>{});
      }
    }
  }
};

template <typename S>
__device__ void GatherKeys(const WideProblem& w, const WideShared<S>& shared, int items) {
  const Problem& p = w.p;
  PipelineState<S::kStages> state;
  // Two stages arrive while a third one is asked for.
  uint32_t older = 0, newer = 0;
  auto follow = [&](uint32_t full) {
    CommitCopies();
    WaitCopies<2>();
    if (older != 0) ReleaseStores(older);
    older = newer, newer = full;
  };
  auto drain = [&] {
    WaitCopies<0>();
    if (older != 0) ReleaseStores(older);
    if (newer != 0) ReleaseStores(newer);
    older = newer = 0;
  };
  ForEachTile(w, shared, items, threadIdx.x / 32 == shared.Leader(true), [&](const ManyTile& tile) {
    const WideRows<S> rows{p, tile};
    const WideRows<S, true> value_rows{p, tile};
    const int first_row = threadIdx.x / 32 * WideRows<S>::kCount;
    const int first = tile.begin / S::kKeys;
    int n = (tile.end + S::kKeys - 1) / S::kKeys - 1;
    int2 place = rows.Locate(n, first_row);
    for (; n >= first; --n) {
      const int2 next = rows.Locate(n - 1, first_row);  // early, to hide the block table's latency
      WaitBarrier(shared.keys_empty(state.stage), state.parity ^ 1);
      rows.Copy(p.k, place, first_row, shared.keys(state.stage));
      follow(shared.keys_full(state.stage));
      WaitBarrier(shared.values_empty(state.stage), state.parity ^ 1);
      value_rows.Copy(p.v, place, first_row, shared.values(state.stage));
      follow(shared.values_full(state.stage));
      // With two stages there is nothing to ask for before they are used.
      if constexpr (S::kStages == 2) drain();
      state.Next();
      place = next;
    }
    drain();
  });
}

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_GATHER_CUH_
