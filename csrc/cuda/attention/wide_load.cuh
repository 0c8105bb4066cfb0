// What wide's warps share, and the warps that load: the q tiles of a thread block, the stages in
// shared memory, and the TMA loads that fill them.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_LOAD_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_LOAD_CUH_

#include <cstddef>

#include "cuda/attention/dispatch.cuh"
#include "cuda/attention/hopper.cuh"
#include "cuda/attention/many_parts.cuh"
#include "cuda/attention/mma.cuh"
#include "cuda/attention/plan_sequences.cuh"
#include "cuda/attention/problem.cuh"

namespace flashxla::attention {

// What an own plan keeps of a thread block's q tile.
struct OwnTile {
  uint16_t index, head, kv_head;
  uint8_t part, parts;
  int32_t first_query, k;  // k: see TakePart

  // S: the WideShape.
  template <typename S>
  __device__ ManyTile Tile(const Sequence& s, const Window& window) const {
    ManyTile tile = ManyTileOf(s, index, window, first_query, S::kQTileTokens);
    tile.head = head, tile.kv_head = kv_head;
    if (S::kDivides && parts > 1) TakePart(S::kKeys, k, part, parts, &tile);
    return tile;
  }
};

// In shared memory queries, keys and values lie in blocks of columns, i.e. rows of 128 bytes.
constexpr int kWideRowBytes = 128;

// Boxes of fewer keys take TMA longer than threads.
constexpr int kWideLeastBoxKeys = 8;
constexpr int kGatheringWarps = kWarpgroupThreads / 32;

constexpr int kTileWords = sizeof(ManyTile) / 4;

// How keys and values get from memory to the products.
enum class WideKeys {
  kDirect,   // 16 bit, as the queries: TMA loads them
  kWidened,  // fp8, under 16-bit queries: warps widen keys to the queries' dtype, values to float16
  kFp8,      // e4m3, as the queries: products of e4m3. Warps turn the values around
};

// What an instance has code for: ALiBi costs registers, and code between what all calls need costs
// time, though it is not executed.
enum class WideScores {
  kPlain,  // scores are products times a number
  kMore,   // and a softcap, and q tiles whose keys are divided into parts
  kAny,    // and ALiBi, and direct keys in pages so small that threads copy them
};

// Warpgroups that multiply.
constexpr int kMaxWideConsumers = 3;
constexpr int WideConsumers(int dims, WideKeys keys, WideScores scores) {
  return dims <= 64 && keys == WideKeys::kDirect && scores != WideScores::kAny ? 3 : 2;
}

// What a thread has of a part's result, in vectors of 4: a share of two rows' outputs, then their
// largest scores and sums.
constexpr int WidePartialVectors(int dims) { return dims / 8 + 1; }

// Keys of a kv tile: as many as leave room for two stages.
constexpr int WideKvTileKeys(int dims, WideKeys keys) {
  return dims <= 128 ? 128 : keys == WideKeys::kWidened ? 64 : dims <= 192 ? 96 : 80;
}

template <int kDims, WideKeys kKeyKind, WideScores kScores>
struct WideShape {
  static constexpr bool kDirect = kKeyKind == WideKeys::kDirect;
  static constexpr bool kWidened = kKeyKind == WideKeys::kWidened;
  static constexpr bool kFp8 = kKeyKind == WideKeys::kFp8;
  static constexpr bool kSoftcap = kScores != WideScores::kPlain;
  static constexpr bool kDivides = kDirect ? kScores == WideScores::kMore : kSoftcap;
  static constexpr bool kAlibi = kScores == WideScores::kAny;
  static constexpr bool kGathers = kDirect && kScores == WideScores::kAny;
  static constexpr int kKeys = WideKvTileKeys(kDims, kKeyKind);
  // Consumer warpgroups, each with 64 rows. Where the registers suffice for three, a third one
  // hides what the other two wait for.
  static constexpr int kConsumers = WideConsumers(kDims, kKeyKind, kScores);
  static constexpr int kQTileTokens = 64 * kConsumers;
  static_assert(kQTileTokens >= kManyQTileTokens);  // for which the plan's list has room
  static constexpr int kConsumerThreads = kConsumers * kWarpgroupThreads;
  // To convert takes a warpgroup more than to load. Heads above 128 leave no registers for that.
  static constexpr bool kManyProducers = !kDirect && kDims <= 128;
  static constexpr int kElementBytes = kFp8 ? 1 : 2;  // of the products
  static constexpr int kBlockColumns = kWideRowBytes / kElementBytes;
  static constexpr int kBlocks = (kDims + kBlockColumns - 1) / kBlockColumns;
  static constexpr int kStages = kFp8 || kDims <= 64 ? 4 : kDims <= 128 ? 3 : 2;  // of keys
  // Of values: they are in use for shorter.
  static constexpr int kValueStages = kWidened && kDims <= 128 ? kStages - 1 : kStages;
  static constexpr int kQueryStages = kConsumers > 2 ? 2 : 1;
  // Keeps queries in registers, so that matrix instructions do not read them from shared memory
  // each time.
  static constexpr bool kQueriesInRegisters = kDims <= 128 && !kWidened && kConsumers == 2;
  static constexpr int kQueryBytes = kQTileTokens * kBlocks * kWideRowBytes;
  static constexpr int kKeyBytes = kKeys * kBlocks * kWideRowBytes;  // of a stage
  // Values of e4m3 are turned: [dims, keys].
  static constexpr int kValueBytes = kFp8 ? kDims * kWideRowBytes : kKeyBytes;
  // fp8 keys or values as they are in memory.
  static constexpr int kRawColumns = kWideRowBytes;
  static constexpr int kRawBlocks = (kDims + kRawColumns - 1) / kRawColumns;
  static constexpr int kRawBytes = kKeys * kRawBlocks * kWideRowBytes;
  static constexpr int kRawStages = kDirect ? 0 : 2;
  static constexpr int kProducerThreads = (kManyProducers ? 2 : 1) * kWarpgroupThreads;
  static constexpr int kThreads = kProducerThreads + kConsumerThreads;
  static constexpr int kConvertingWarps = kDirect ? 0 : kProducerThreads / 32 - 1;  // one loads
  static constexpr int kTileStages = 4;  // q tiles that warps may be apart
  static constexpr int kTileBytes =
      kTileStages * int{sizeof(ManyTile)} + kMaxOwnRounds * int{sizeof(OwnTile)};
  static constexpr int kBarrierBytes =
      8 * 2 * (kQueryStages + kStages + kValueStages + kRawStages + kTileStages);
  // Aligning the stages may take up to 1 KB.
  static constexpr int kBytes = 1024 + kQueryStages * kQueryBytes + kStages * kKeyBytes +
                                kValueStages * kValueBytes + kRawStages * kRawBytes + kTileBytes +
                                kBarrierBytes;
  // Of a thread: together what all threads have at the start.
  static constexpr bool kLoadsByTma = kDirect && !kAlibi;  // and does nothing else
  static constexpr int kProducerRegisters = kManyProducers   ? 48
                                            : !kLoadsByTma   ? 40
                                            : kConsumers > 2 ? 32
                                                             : 24;
  static constexpr int kConsumerRegisters = kConsumers > 2   ? 160
                                            : kManyProducers ? 208
                                            : !kLoadsByTma   ? 232
                                                             : 240;
  static_assert(kBytes <= 227 * 1024);
};

struct WideProblem {
  CUtensorMap q, k, v;
  Problem p;
  int box_keys;  // keys per TMA box, which lies in one page
  bool gathers;  // plain keys: threads copy them, not TMA
  bool divides;  // the plan may divide q tiles into parts
  // The results of these, and a flag for those of each warpgroup.
  float4* partials;
  uint64_t* flags;
  uint64_t tag;  // what a flag says in this call
};

#if defined(FLASHXLA_HOPPER)

// Addresses in shared memory: stages of queries, of keys and of values, of raw keys and values, and
// of q tiles. Each stage has two barriers, one for "it is full" and one for "it is empty".
template <typename S>
struct WideShared {
  uint32_t base, barriers;
  ManyTile* first_tile;

  __device__ explicit WideShared(char* shared) {
    base = (SharedAddress(shared) + 1023) / 1024 * 1024;
    first_tile = reinterpret_cast<ManyTile*>(shared + (raw(S::kRawStages) - SharedAddress(shared)));
    barriers = raw(S::kRawStages) + S::kTileBytes;
  }
  __device__ uint32_t queries(int stage) const { return base + stage * S::kQueryBytes; }
  __device__ uint32_t keys(int stage) const {
    return queries(S::kQueryStages) + stage * S::kKeyBytes;
  }
  __device__ uint32_t values(int stage) const { return keys(S::kStages) + stage * S::kValueBytes; }
  __device__ uint32_t raw(int stage) const {
    return values(S::kValueStages) + stage * S::kRawBytes;
  }
  __device__ uint32_t keys_full(int i) const { return barriers + 8 * i; }
  __device__ uint32_t keys_empty(int i) const { return keys_full(S::kStages + i); }
  __device__ uint32_t values_full(int i) const { return keys_full(2 * S::kStages + i); }
  __device__ uint32_t values_empty(int i) const { return values_full(S::kValueStages + i); }
  __device__ uint32_t queries_full(int i) const { return values_full(2 * S::kValueStages + i); }
  __device__ uint32_t queries_empty(int i) const { return queries_full(S::kQueryStages + i); }
  __device__ uint32_t raw_full(int i) const { return queries_full(2 * S::kQueryStages + i); }
  __device__ uint32_t raw_empty(int i) const { return raw_full(S::kRawStages + i); }
  __device__ uint32_t tile_full(int i) const { return raw_full(2 * S::kRawStages + i); }
  __device__ uint32_t tile_empty(int i) const { return tile_full(S::kTileStages + i); }

  __device__ ManyTile* tile(int stage) const { return first_tile + stage; }
  // Own plan: the block's q tile of each round.
  __device__ OwnTile* own_tiles() const { return reinterpret_cast<OwnTile*>(tile(S::kTileStages)); }

  // One thread must call it.
  __device__ void InitBarriers(bool gathers) const {
    constexpr int kConverters = 32 * S::kConvertingWarps;
    const int plain = gathers ? 32 * kGatheringWarps : 1;
    for (int i = 0; i < S::kQueryStages; ++i) {
      InitBarrier(queries_full(i), 1);
      InitBarrier(queries_empty(i), S::kConsumerThreads);
    }
    for (int i = 0; i < S::kStages; ++i) {
      InitBarrier(keys_full(i), S::kDirect ? plain : S::kFp8 ? 1 : kConverters);
      InitBarrier(keys_empty(i), S::kConsumerThreads);
    }
    for (int i = 0; i < S::kValueStages; ++i) {
      InitBarrier(values_full(i), S::kDirect ? plain : kConverters);
      InitBarrier(values_empty(i), S::kConsumerThreads);
    }
    for (int i = 0; i < S::kRawStages; ++i) {
      InitBarrier(raw_full(i), 1);
      InitBarrier(raw_empty(i), kConverters);
    }
    for (int i = 0; i < S::kTileStages; ++i) {
      InitBarrier(tile_full(i), 32);
      InitBarrier(tile_empty(i),
                  S::kConsumerThreads + (S::kDirect && !gathers ? 96 : S::kProducerThreads));
    }
    FenceProxy();
  }
};

// A position in a ring of stages, and the parity of the barriers in this round.
template <int kStages>
struct PipelineState {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void Next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// A warp's walk through the q tiles of the thread block.
template <typename S>
class WideTiles {
 public:
  __device__ explicit WideTiles(const WideShared<S>& shared) : shared_(shared) {}

  // Moves to the next tile; false if there are no more.
  __device__ bool Next(ManyTile* tile) {
    WaitBarrier(shared_.tile_full(state_.stage), state_.parity);
    *tile = Read();
    return tile->index >= 0;
  }
  // Each warp must say that it is done with a tile before it asks for the next one.
  __device__ void Done() {
    Release(shared_.tile_empty(state_.stage));
    state_.Next();
  }
  // The present tile. To read it anew takes fewer registers than to keep it.
  __device__ ManyTile Read() const { return ReadTogether(shared_.tile(state_.stage)); }

 private:
  const WideShared<S>& shared_;
  PipelineState<S::kTileStages> state_;
};

// The tile scheduler: hands the q tiles of the thread block to all of its warps, one per round. One
// warp has it, which is a round ahead of the consumers.
template <typename S>
class WideSchedule {
 public:
  // items: parts of q tiles of all heads.
  __device__ WideSchedule(const WideShared<S>& shared, int items)
      : shared_(shared), items_(items) {}

  __device__ void HandOut(const Problem& p) {
    const int lane = threadIdx.x & 31;
    const int item = ItemOfRound(round_, blockIdx.x, gridDim.x);
    WaitBarrier(shared_.tile_empty(state_.stage), state_.parity ^ 1);
    if (!p.makes_plan) {
      int word = -1;
      if (lane < kTileWords && item < items_) {
        const int head = item % p.num_heads;
        word = reinterpret_cast<const int*>(&p.plan.many_tiles[item / p.num_heads])[lane];
        if (lane == offsetof(ManyTile, head) / 4) word = head;
        if (lane == offsetof(ManyTile, kv_head) / 4) word = head / p.group_size;
      }
      if (lane < kTileWords) reinterpret_cast<int*>(shared_.tile(state_.stage))[lane] = word;
    } else if (round_ > 0 && lane == 0) {  // the first one is there
      *shared_.tile(state_.stage) = TileOfOwn(p, item);
    }
    Release(shared_.tile_full(state_.stage));
    state_.Next(), ++round_;
  }

 private:
  // The block's q tile in an own plan. What it is made from is read anew: shared memory lacks room.
  __device__ ManyTile TileOfOwn(const Problem& p, int item) const {
    ManyTile tile = {};
    tile.index = -1;
    if (item >= items_) return tile;
    const OwnTile own = shared_.own_tiles()[round_];
    Sequence s;
    ReadKeys(p.index, own.index, &s);
    s.first_query = At(p.index.cu_seqlens_q, own.index);
    s.num_queries = At(p.index.cu_seqlens_q, own.index + 1) - s.first_query;
    return own.template Tile<S>(s, p.window);
  }

  const WideShared<S>& shared_;
  PipelineState<S::kTileStages> state_;
  int round_ = 0, items_;
};

// A warp loads the queries of a q tile.
template <typename S>
__device__ void LoadQueryTile(const WideProblem& w, const WideShared<S>& shared,
                              const ManyTile& tile, PipelineState<S::kQueryStages>& state) {
  const uint32_t full = shared.queries_full(state.stage);
  WaitBarrier(shared.queries_empty(state.stage), state.parity ^ 1);
  if (threadIdx.x % 32 == 0) {
    ArriveExpecting(full, S::kQueryBytes);
    for (int c = 0; c < S::kBlocks; ++c) {
      LoadBox3(shared.queries(state.stage) + c * S::kQTileTokens * kWideRowBytes, &w.q, full,
               c * S::kBlockColumns, tile.head, tile.s.first_query + tile.first_query);
    }
  }
  __syncwarp();
  state.Next();
}

// The boxes of kv tiles. A lane of a warp has one of each tile; where pages are
// small, several.
template <typename S>
struct WideBoxes {
  static constexpr int kKeys = S::kKeys;
  const WideProblem& w;
  const ManyTile& tile;
  int count;  // boxes of a kv tile

  __device__ WideBoxes(const WideProblem& problem, const ManyTile& q_tile)
      : w(problem), tile(q_tile), count(kKeys / problem.box_keys) {}

  // The block and token of a box of kv tile n. For keys that do not exist it is a box outside the
  // cache, which TMA fills with zeros.
  __device__ int2 Locate(int n, int box) const {
    const Problem& p = w.p;
    const int key = n * kKeys + box * w.box_keys;
    if (p.block_table.data == nullptr) return make_int2(0, tile.s.key_row + key);
    int2 place = make_int2(p.block_table.num_blocks, 0);
    if (box < count && key >= 0 && key < tile.s.num_keys) {
      p.Locate(tile.s, tile.index, key, &place.x, &place.y);
    }
    return place;
  }

  // Starts to load kv tile n, in kBlocks blocks of kColumns columns. place: that of the lane's
  // first box.
  template <int kBlocks, int kColumns>
  __device__ void Load(const CUtensorMap* map, uint32_t to, uint32_t full, int n,
                       int2 place) const {
    const int lane = threadIdx.x & 31;
    constexpr int kBlockBytes = kKeys * kWideRowBytes;
    if (lane == 0) ArriveExpecting(full, kBlocks * kBlockBytes);
    __syncwarp();
#pragma unroll 1
    for (int box = lane; box < count; box += 32) {
      if (box != lane) place = Locate(n, box);
#pragma unroll
      for (int c = 0; c < kBlocks; ++c) {
        LoadBox4(to + c * kBlockBytes + box * w.box_keys * kWideRowBytes, map, full, c * kColumns,
                 tile.kv_head, place.y, place.x);
      }
    }
  }
};

// Plain keys: one warp loads the queries, one the keys and one the values, since starting a copy
// takes time.
template <typename S>
__device__ void LoadQueries(const WideProblem& w, const WideShared<S>& shared, int items) {
  PipelineState<S::kQueryStages> state;
  WideSchedule<S> schedule(shared, items);
  WideTiles<S> tiles(shared);
  schedule.HandOut(w.p);
  for (ManyTile tile; tiles.Next(&tile); tiles.Done()) {
    LoadQueryTile(w, shared, tile, state);
    schedule.HandOut(w.p);
  }
}

template <typename S, bool kValues>
__device__ void LoadKeys(const WideProblem& w, const WideShared<S>& shared) {
  const int lane = threadIdx.x & 31;
  PipelineState<S::kStages> state;
  WideTiles<S> tiles(shared);
  for (ManyTile tile; tiles.Next(&tile); tiles.Done()) {
    const WideBoxes<S> boxes(w, tile);
    const int first = tile.begin / S::kKeys;
    int n = (tile.end + S::kKeys - 1) / S::kKeys - 1;
    int2 place = boxes.Locate(n, lane);
    for (; n >= first; --n) {
      const int2 next = boxes.Locate(n - 1, lane);  // early, to hide the block table's latency
      WaitBarrier(kValues ? shared.values_empty(state.stage) : shared.keys_empty(state.stage),
                  state.parity ^ 1);
      boxes.template Load<S::kBlocks, S::kBlockColumns>(
          kValues ? &w.v : &w.k, kValues ? shared.values(state.stage) : shared.keys(state.stage),
          kValues ? shared.values_full(state.stage) : shared.keys_full(state.stage), n, place);
      state.Next();
      place = next;
    }
  }
}

// fp8 keys: one warp loads everything; the others convert what comes as it is in memory.
template <typename S>
__device__ void LoadRaw(const WideProblem& w, const WideShared<S>& shared, int items) {
  const int lane = threadIdx.x & 31;
  PipelineState<S::kQueryStages> queries;
  PipelineState<S::kStages> keys;
  PipelineState<S::kRawStages> raw;
  WideSchedule<S> schedule(shared, items);
  WideTiles<S> tiles(shared);
  schedule.HandOut(w.p);
  for (ManyTile tile; tiles.Next(&tile); tiles.Done()) {
    LoadQueryTile(w, shared, tile, queries);
    schedule.HandOut(w.p);
    const WideBoxes<S> boxes(w, tile);
    auto load_raw = [&](const CUtensorMap* map, int n, int2 place) {
      WaitBarrier(shared.raw_empty(raw.stage), raw.parity ^ 1);
      boxes.template Load<S::kRawBlocks, S::kRawColumns>(map, shared.raw(raw.stage),
                                                         shared.raw_full(raw.stage), n, place);
      raw.Next();
    };
    const int first = tile.begin / S::kKeys;
    int n = (tile.end + S::kKeys - 1) / S::kKeys - 1;
    int2 place = boxes.Locate(n, lane);
    for (; n >= first; --n) {
      const int2 next = boxes.Locate(n - 1, lane);
      if constexpr (S::kFp8) {
        WaitBarrier(shared.keys_empty(keys.stage), keys.parity ^ 1);
        boxes.template Load<S::kBlocks, S::kBlockColumns>(&w.k, shared.keys(keys.stage),
                                                          shared.keys_full(keys.stage), n, place);
        keys.Next();
      } else {
        load_raw(&w.k, n, place);
      }
      load_raw(&w.v, n, place);
      place = next;
    }
  }
}

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_LOAD_CUH_
