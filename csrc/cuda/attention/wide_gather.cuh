// wide's producer warps where the page size is no multiple of 8 keys, or heads are odd
// (wide_odd.cuh). TMA takes some 30 cycles for a box, however small, so here all of these warps
// copy keys, row by row.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_GATHER_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_GATHER_CUH_

#include <type_traits>

#include "cuda/attention/copied_rows.cuh"
#include "cuda/attention/wide_load.cuh"

namespace flashxla::attention {

#if defined(FLASHXLA_HOPPER)

// Rows of kv tiles as a warp copies them. Rows of e4m3 stay as they are in memory.
template <typename S, bool kValues = false>
struct WideRows {
  static constexpr int kBlocks = kValues ? S::kValueBlocks : S::kBlocks;
  static constexpr int kCount = S::kKeys / (S::kProducerThreads / 32);
  using Rows = CopiedRows<S::kKeys, kCount, kBlocks * kWideRowBytes / 16, S::kDirect ? 8 : 16>;
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
    auto copy = [&](auto unit) {
      Rows::template Copy<decltype(unit)::value>(cache, tile.kv_head, place, first_row, stage);
    };
    if constexpr (S::kOddHeads) {
      if (p.kv_unit == 8) return copy(std::integral_constant<int, 8>{});
      if (p.kv_unit == 4) return copy(std::integral_constant<int, 4>{});
    }
    copy(std::integral_constant<int, 16>{});
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
