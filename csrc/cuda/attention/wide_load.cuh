// wide's producer warps: the TMA loads that fill the stages.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_LOAD_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_LOAD_CUH_

#include "cuda/attention/wide_tiles.cuh"

namespace flashxla::attention {

#if defined(FLASHXLA_HOPPER)

// A warp loads the queries of a q tile, and finds its rule.
template <typename S>
__device__ void LoadQueryTile(const WideProblem& w, const WideShared<S>& shared,
                              const ManyTile& tile, TileRule* rule,
                              PipelineState<S::kQueryStages>& state) {
  const uint32_t full = shared.queries_full(state.stage);
  WaitBarrier(shared.queries_empty(state.stage), state.parity ^ 1);
  constexpr int kLoaded = S::kWidensQueries ? S::kRawBlocks : S::kBlocks;
  if (threadIdx.x % 32 == 0) {
    const TileRows<S> rows{w};
    if constexpr (S::kOddHeads) {
      Arrive(full);  // the consumers load them
    } else {
      ArriveExpecting(full, kLoaded * rows.tokens() * rows.heads() * kWideRowBytes);
      for (int c = 0; c < kLoaded; ++c) {
        LoadBox3(shared.queries(state.stage) + c * S::kQTileRows * kWideRowBytes, &w.q, full,
                 c * S::kLoadedQueryColumns, tile.head, tile.s.first_query + tile.first_query);
      }
    }
    *rule = TileRule::Of(w.p, tile);
    Arrive(full);
  }
  __syncwarp();
  state.Next();
}

// Calls body(tile) for each q tile of the thread block. The warp that leads hands them out to all
// warps, a round ahead, and loads their queries.
template <typename S, typename Body>
__device__ void ForEachTile(const WideProblem& w, const WideShared<S>& shared, int items,
                            bool leads, Body&& body) {
  PipelineState<S::kQueryStages> queries;
  WideSchedule<S> schedule(shared, items);
  WideTiles<S> tiles(shared);
  if (leads) schedule.HandOut(w);
  for (ManyTile tile; tiles.Next(&tile); tiles.Done()) {
    if (leads) {
      LoadQueryTile(w, shared, tile, tiles.rule(), queries);
      schedule.HandOut(w);
    }
    body(tile);
  }
}

// The boxes of kv tiles. A lane of a warp has one of each tile.
template <typename S>
struct WideBoxes {
  static constexpr int kKeys = S::kKeys;
  static_assert(kKeys / S::kLeastBoxKeys <= 32);
  const WideProblem& w;
  const ManyTile& tile;
  const int32_t* pages;  // of the sequence; null: dense
  int count;             // boxes of a kv tile

  __device__ WideBoxes(const WideProblem& problem, const ManyTile& q_tile)
      : w(problem), tile(q_tile), pages(w.p.block_table.data), count(kKeys / problem.box_keys) {
    if (pages != nullptr) pages += tile.index * w.p.block_table.stride_sequence;
  }

  // The block and token of the lane's box of kv tile n. For keys that do not exist it is a box
  // outside the cache, which TMA fills with zeros. (So is every unsound page. No row sees its keys:
  // see CheckTables.)
  __device__ int2 Locate(int n) const {
    const BlockTable& table = w.p.block_table;
    const int box = threadIdx.x & 31;
    const int key = n * kKeys + box * w.box_keys;
    if (pages == nullptr) return make_int2(0, tile.s.key_row + key);
    if (box >= count || key < 0 || key >= tile.s.num_keys) return make_int2(table.num_blocks, 0);
    const int page = w.block_size.Quotient(key);
    return make_int2(pages[page * table.stride_page], key - page * table.block_size);
  }

  // Starts to load a kv tile, in kBlocks blocks of kColumns columns. place: that of the lane's box.
  template <int kBlocks, int kColumns>
  __device__ void Load(const CUtensorMap* map, uint32_t to, uint32_t full, int2 place) const {
    const int lane = threadIdx.x & 31;
    constexpr int kBlockBytes = kKeys * kWideRowBytes;
    if (lane == 0) ArriveExpecting(full, kBlocks * kBlockBytes);
    __syncwarp();
    if (lane >= count) return;
#pragma unroll
    for (int c = 0; c < kBlocks; ++c) {
      LoadBox4(to + c * kBlockBytes + lane * w.box_keys * kWideRowBytes, map, full, c * kColumns,
               tile.kv_head, place.y, place.x);
    }
  }
};

// Plain keys: one warp loads the queries, one the keys and one the values, since starting a copy
// takes time.
template <typename S>
__device__ void LoadQueries(const WideProblem& w, const WideShared<S>& shared, int items) {
  ForEachTile(w, shared, items, true, [](const ManyTile&) {});
}

template <typename S, bool kValues>
__device__ void LoadKeys(const WideProblem& w, const WideShared<S>& shared) {
  PipelineState<S::kStages> state;
  WideTiles<S> tiles(shared);
  for (ManyTile tile; tiles.Next(&tile); tiles.Done()) {
    const WideBoxes<S> boxes(w, tile);
    const int first = tile.begin / S::kKeys, last = (tile.end + S::kKeys - 1) / S::kKeys - 1;
    int2 place;
    // Each kv tile is located a turn before it is loaded, to hide the block table's latency.
    for (int n = last + 1; n >= first; --n) {
      const int2 next = boxes.Locate(n - 1);
      if (n > last) {
        place = next;
        continue;
      }
      WaitBarrier(kValues ? shared.values_empty(state.stage) : shared.keys_empty(state.stage),
                  state.parity ^ 1);
      boxes.template Load<kValues ? S::kValueBlocks : S::kBlocks, S::kBlockColumns>(
          kValues ? &w.v : &w.k, kValues ? shared.values(state.stage) : shared.keys(state.stage),
          kValues ? shared.values_full(state.stage) : shared.keys_full(state.stage), place);
      state.Next();
      place = next;
    }
  }
}

// fp8 keys: one warp loads everything; the others convert what comes as it is in memory.
template <typename S>
__device__ void LoadRaw(const WideProblem& w, const WideShared<S>& shared, int items) {
  PipelineState<S::kStages> keys;
  PipelineState<S::kRawStages> raw;
  ForEachTile(w, shared, items, true, [&](const ManyTile& tile) {
    const WideBoxes<S> boxes(w, tile);
    auto load_raw = [&](const CUtensorMap* map, int2 place) {
      WaitBarrier(shared.raw_empty(raw.stage), raw.parity ^ 1);
      boxes.template Load<S::kRawBlocks, S::kRawColumns>(map, shared.raw(raw.stage),
                                                         shared.raw_full(raw.stage), place);
      raw.Next();
    };
    const int first = tile.begin / S::kKeys;
    int n = (tile.end + S::kKeys - 1) / S::kKeys - 1;
    int2 place = boxes.Locate(n);
    for (; n >= first; --n) {
      const int2 next = boxes.Locate(n - 1);
      if constexpr (S::kFp8) {
        WaitBarrier(shared.keys_empty(keys.stage), keys.parity ^ 1);
        boxes.template Load<S::kBlocks, S::kBlockColumns>(&w.k, shared.keys(keys.stage),
                                                          shared.keys_full(keys.stage), place);
        keys.Next();
      } else {
        load_raw(&w.k, place);
      }
      load_raw(&w.v, place);
      place = next;
    }
  });
}

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_LOAD_CUH_
