// The sizes of wide's instances, and what its warps share: stages in shared memory, and barriers.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_SHARED_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_SHARED_CUH_

#include "cuda/attention/hopper.cuh"
#include "cuda/attention/many_parts.cuh"
#include "cuda/attention/plan_sequences.cuh"
#include "cuda/attention/problem.cuh"
#include "cuda/attention/wide_rule.cuh"
#include "cuda/fast_divide.h"

namespace flashxla::attention {

// What an own plan keeps of a thread block's q tile.
struct OwnTile {
  uint16_t index, head, kv_head;
  uint8_t part, parts;
  int32_t first_query, k;  // k: see TakePart

  // S: the WideShape.
  template <typename S>
  __device__ ManyTile Tile(const Sequence& s, const Window& window, int q_tile_tokens) const {
    ManyTile tile = ManyTileOf(s, index, window, first_query, q_tile_tokens);
    tile.head = head, tile.kv_head = kv_head;
    if (S::kDivides && parts > 1) TakePart(S::kKeys, k, part, parts, &tile);
    return tile;
  }
};

// In shared memory queries, keys and values lie in blocks of columns, i.e. rows of 128 bytes.
constexpr int kWideRowBytes = 128;

// How keys and values get from memory to the products.
enum class WideKeys {
  kDirect,   // 16 bit, as the queries: TMA loads them
  kWidened,  // fp8, under 16-bit queries: warps widen keys to the queries' dtype, values to float16
  kAllWidened,  // the same of fp8 queries, which are widened to bfloat16
  kFp8,         // e4m3, as the queries: products of e4m3. Warps turn the values around
};

constexpr bool IsWidened(WideKeys keys) {
  return keys == WideKeys::kWidened || keys == WideKeys::kAllWidened;
}

// Boxes of fewer keys take TMA longer than threads, which have more to do where they widen keys.
constexpr int WideLeastBoxKeys(int dims, WideKeys keys) {
  return IsWidened(keys) && dims > 64 ? 4 : 8;
}

// What an instance has code for: ALiBi costs registers, and code between what all calls need costs
// time, though it is not executed.
enum class WideScores {
  kPlain,   // scores are products times a number
  kPacked,  // and q tiles have several heads
  kMore,    // and a softcap, keys in pages so small that threads copy them, and q tiles whose keys
            // are divided into parts
  kFixed,   // 16-bit keys with batch_invariant: the same, but for fixed parts
  kAny,     // and ALiBi. Of fp8 keys: all of this. Of 16-bit keys: a softcap, small pages and ALiBi
  kOdd,     // odd heads (wide_odd.cuh), whose keys threads copy: all of this, but ALiBi only of fp8
            // keys
};

// Warpgroups that multiply. A third one hides what the other two wait for, where the registers
// suffice.
constexpr int WideConsumers(int dims, WideKeys keys, WideScores scores) {
  const bool much_code = scores == WideScores::kAny || scores == WideScores::kOdd;
  const int most_dims = keys == WideKeys::kFp8 ? 128 : keys == WideKeys::kDirect ? 64 : 0;
  return dims <= most_dims && !much_code ? 3 : 2;
}

// What a thread has of a part's result, in vectors of 4: a share of two rows' outputs, then their
// largest scores and sums.
constexpr int WidePartialVectors(int value_dims) { return value_dims / 8 + 1; }

// Keys of a kv tile: as many as leave room for two stages, and of e4m3 as many as the registers
// take.
constexpr int WideKvTileKeys(int value_dims, WideKeys keys) {
  if (keys == WideKeys::kFp8) return value_dims == 192 ? 128 : 96;
  return value_dims <= 128 ? 128 : IsWidened(keys) ? 64 : value_dims <= 192 ? 96 : 80;
}

template <int kDims, int kValueDimsOf, WideKeys kKeyKind, WideScores kScores>
struct WideShape {
  static constexpr int kValueDims = kValueDimsOf;
  static constexpr bool kDirect = kKeyKind == WideKeys::kDirect;
  static constexpr bool kWidened = IsWidened(kKeyKind);
  static constexpr bool kWidensQueries = kKeyKind == WideKeys::kAllWidened;
  static constexpr bool kFp8 = kKeyKind == WideKeys::kFp8;
  static constexpr bool kSoftcap = kScores != WideScores::kPlain && kScores != WideScores::kPacked;
  static constexpr bool kDivides = kSoftcap && !(kDirect && kScores == WideScores::kAny);
  static constexpr bool kOddHeads = kScores == WideScores::kOdd;
  static constexpr bool kPacks = kDivides || kScores == WideScores::kPacked;
  static constexpr bool kFixedParts =
      kDivides && (!kDirect || kOddHeads || kScores == WideScores::kFixed);
  static constexpr bool kAnyParts = kDivides && !(kDirect && kScores == WideScores::kFixed);
  static constexpr bool kAlibi = kScores == WideScores::kAny || (kOddHeads && !kDirect);
  static constexpr bool kGathers = kSoftcap;  // may copy keys by threads
  static constexpr int kKeys = WideKvTileKeys(kValueDims, kKeyKind);
  static constexpr int kLeastBoxKeys = WideLeastBoxKeys(kDims, kKeyKind);
  // Consumer warpgroups, each with 64 rows.
  static constexpr int kConsumers = WideConsumers(kDims, kKeyKind, kScores);
  static constexpr int kQTileRows = 64 * kConsumers;
  static constexpr int kConsumerThreads = kConsumers * kWarpgroupThreads;
  // Matrix instructions that make an output's columns. With so many warps ptxas accepts none that
  // takes 128 registers for its results.
  static constexpr int kOutParts = kWidened && kDims > 192 ? 2 : 1;
  static constexpr int kElementBytes = kFp8 ? 1 : 2;  // of the products
  static constexpr int kBlockColumns = kWideRowBytes / kElementBytes;
  static constexpr int kBlocks = (kDims + kBlockColumns - 1) / kBlockColumns;
  static constexpr int kValueBlocks = (kValueDims + kBlockColumns - 1) / kBlockColumns;
  static constexpr int kStages =  // of keys
      kDims <= (kFp8 ? 128 : 64) ? 4
      : kDims <= 128             ? 3
                                 : 2;
  // Of values: they are in use for shorter.
  static constexpr int kValueStages = kWidened && kDims <= 128 ? kStages - 1 : kStages;
  static constexpr int kQueryStages = kConsumers > 2 ? 2 : 1;
  // Keeps queries in registers, so that matrix instructions do not read them from shared memory
  // each time. With a softcap, and where the keys of q tiles are divided, the softmax makes better
  // use of the registers.
  static constexpr bool kQueriesInRegisters =
      kDims <= 128 && !kWidened && kConsumers == 2 && !(kDirect && kDivides);
  static constexpr int kQueryBytes = kQTileRows * kBlocks * kWideRowBytes;
  static constexpr int kKeyBytes = kKeys * kBlocks * kWideRowBytes;  // of a stage
  // Values of e4m3 are turned: [dims, keys].
  static constexpr int kValueBytes = (kFp8 ? kValueDims : kKeys * kValueBlocks) * kWideRowBytes;
  // fp8 keys or values as they are in memory. (Keys of e4m3 are so for the products.)
  static constexpr int kRawColumns = kWideRowBytes;
  static constexpr int kRawBlocks = ((kFp8 ? kValueDims : kDims) + kRawColumns - 1) / kRawColumns;
  static constexpr int kLoadedQueryColumns = kWidensQueries ? kRawColumns : kBlockColumns;
  static constexpr int kRawBytes = kKeys * kRawBlocks * kWideRowBytes;
  static constexpr int kRawStages = kDirect ? 0 : 2;
  // To widen takes a warpgroup more than to load, or to turn values around.
  static constexpr int kProducerThreads = (kWidened ? 2 : 1) * kWarpgroupThreads;
  static constexpr int kThreads = kProducerThreads + kConsumerThreads;
  static constexpr int kConvertingWarps = kDirect ? 0 : kProducerThreads / 32 - 1;  // one loads
  static constexpr int kTileStages = 4;  // q tiles that warps may be apart
  static constexpr int kTileBytes =
      kTileStages * int{sizeof(ManyTile) + sizeof(TileRule)} + kMaxOwnRounds * int{sizeof(OwnTile)};
  static constexpr int kBarrierBytes =
      8 * 2 * (kQueryStages + kStages + kValueStages + kRawStages + kTileStages);
  // Aligning the stages may take up to 1 KB.
  static constexpr int kBytes = 1024 + kQueryStages * kQueryBytes + kStages * kKeyBytes +
                                kValueStages * kValueBytes + kRawStages * kRawBytes + kTileBytes +
                                kBarrierBytes;
  // Of a thread: together what all threads have at the start. Those who only start copies by TMA
  // get few where the consumers need the rest. Those that copy odd heads, in small units, are short
  // of time, and with fewer of them wait for an address's registers after each copy.
  static constexpr bool kLoadsByTma = kDirect && !kGathers;
  static constexpr bool kConsumersNeedAll = kLoadsByTma && kDims > 192;
  static constexpr int kProducerRegisters = kWidened            ? (kDims > 128 ? 40 : 48)
                                            : kOddHeads         ? (kDims > 128 ? 56 : 72)
                                            : kConsumers > 2    ? 32
                                            : kConsumersNeedAll ? 24
                                                                : 40;
  static constexpr int kConsumerRegisters = kWidened            ? (kDims > 128 ? 216 : 208)
                                            : kOddHeads         ? (kDims > 128 ? 224 : 216)
                                            : kConsumers > 2    ? 160
                                            : kConsumersNeedAll ? 240
                                                                : 232;
  static_assert(kBytes <= 227 * 1024);
};

struct WideProblem {
  CUtensorMap q, k, v;
  Problem p;
  int box_keys;  // keys per TMA box, which lies in one page
  FastDivide block_size;
  ManyShape work;
  FastDivide num_heads;  // as in `work`
  // Of a row's query token, as q tiles have them: those that share a KV head if they are packed,
  // else 1.
  FastDivide packed_heads;
  bool gathers;  // threads copy keys and values, not TMA
  // Own plan: each thread block has one q tile at most: FindLoneTile.
  bool has_lone_tiles;
  // The results of these, each of so many warpgroups, and a flag for those of each. From
  // number `sums` on is one for each thread block: the sum of a q tile's fixed parts up to now.
  float4* partials;
  uint64_t* flags;
  int result_groups, sums;
  uint64_t tag;  // what a flag says in this call
};

#if defined(FLASHXLA_HOPPER)

// How the rows of a q tile lie: those of a token are neighbours. Only some instances have code for
// more than one row of a token.
template <typename S>
struct TileRows {
  const WideProblem& w;

  __device__ int tokens() const { return S::kPacks ? w.work.q_tile_tokens : S::kQTileRows; }
  __device__ int heads() const { return S::kPacks ? static_cast<int>(w.packed_heads.divisor) : 1; }
  // The query token of a row, from the tile's first one on.
  __device__ int Query(int row) const {
    return S::kPacks ? static_cast<int>(w.packed_heads.Quotient(row)) : row;
  }
};

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

  // The warp that hands out the q tiles, and loads their queries.
  __device__ static int Leader(bool gathers) { return S::kDirect && !gathers ? 2 : 0; }
  __device__ ManyTile* tile(int stage) const { return first_tile + stage; }
  // Of a tile: it is there when the queries are.
  __device__ TileRule* rule(int stage) const {
    return reinterpret_cast<TileRule*>(tile(S::kTileStages)) + stage;
  }
  // Own plan: the block's q tile of each round.
  __device__ OwnTile* own_tiles() const { return reinterpret_cast<OwnTile*>(rule(S::kTileStages)); }

  // One thread must call it.
  __device__ void InitBarriers(bool gathers) const {
    constexpr int kConverters = 32 * S::kConvertingWarps;
    const int loaders = gathers ? S::kProducerThreads : 1;
    const int converters = gathers ? S::kProducerThreads : kConverters;  // of widened keys
    for (int i = 0; i < S::kQueryStages; ++i) {
      InitBarrier(queries_full(i), 2);  // with the tile's rule
      InitBarrier(queries_empty(i), S::kConsumerThreads);
    }
    for (int i = 0; i < S::kStages; ++i) {
      InitBarrier(keys_full(i), S::kWidened ? converters : loaders);
      InitBarrier(keys_empty(i), S::kConsumerThreads);
    }
    for (int i = 0; i < S::kValueStages; ++i) {
      InitBarrier(values_full(i), S::kDirect ? loaders : S::kWidened ? converters : kConverters);
      InitBarrier(values_empty(i), S::kConsumerThreads);
    }
    for (int i = 0; i < S::kRawStages; ++i) {
      InitBarrier(raw_full(i), loaders);
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

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_SHARED_CUH_
