// wide: many queries on Hopper. A thread block computes q tiles of one head, or of a KV head.
// The producer warps load by TMA (wide_load.cuh), or row by row where pages are small
// (wide_gather.cuh), and convert fp8 keys (wide_fp8.cuh). Two or three consumer warpgroups, of 64
// rows each, multiply (wide_consumer.cuh).
#include <algorithm>

#include "common/round_up.h"
#include "common/tensor_view.h"
#include "cuda/attention/dispatch.cuh"
#include "cuda/attention/engines.h"
#include "cuda/attention/key_copies.h"
#include "cuda/attention/tensor_map.h"
#include "cuda/attention/wide_consumer.cuh"
#include "cuda/attention/wide_fp8.cuh"
#include "cuda/attention/wide_gather.cuh"
#include "cuda/attention/wide_gather_fp8.cuh"
#include "cuda/attention/wide_load.cuh"
#include "cuda/attention/wide_plan.cuh"
#include "cuda/call_tag.h"

namespace flashxla::attention {
namespace {

#if defined(FLASHXLA_HOPPER)

// The producer warps of fp8 keys.
template <typename T, typename S>
__device__ void Convert(const WideProblem& w, const WideShared<S>& shared, int items) {
  constexpr bool kMayBeE5m2 = !S::kFp8;
  const bool e5m2 = kMayBeE5m2 && w.p.kv_dtype == FLASHXLA_F8E5M2;
  if constexpr (S::kOddHeads) {
    return e5m2 ? GatherOddWidened<T, S, true>(w, shared, items)
                : GatherOddWidened<T, S, false>(w, shared, items);
  } else if constexpr (S::kGathers) {
    if (w.gathers) {
      if constexpr (S::kFp8) return GatherFp8(w, shared, items);
      return e5m2 ? GatherWidened<T, S, kMayBeE5m2>(w, shared, items)
                  : GatherWidened<T, S, false>(w, shared, items);
    }
  }
  if (threadIdx.x / 32 == shared.Leader(false)) return LoadRaw(w, shared, items);
  e5m2 ? ConvertKeys<T, S, kMayBeE5m2>(w, shared) : ConvertKeys<T, S, false>(w, shared);
}

#endif

// Product: what the products of queries and keys take; it is Out but for e4m3.
template <typename Product, typename Out, int kDims, int kValueDims, WideKeys kKeyKind,
          WideScores kScores>
__global__ void __launch_bounds__(WideShape<kDims, kValueDims, kKeyKind, kScores>::kThreads, 1)
    WideKernel(const __grid_constant__ WideProblem w) {
#if defined(FLASHXLA_HOPPER)
  using S = WideShape<kDims, kValueDims, kKeyKind, kScores>;
  extern __shared__ char memory[];
  const WideShared<S> shared(memory);
  if (threadIdx.x == 0) {
    if constexpr (!S::kOddHeads) {
      PrefetchMap(&w.q);
      PrefetchMap(&w.k);
      PrefetchMap(&w.v);
    }
    shared.InitBarriers(w.gathers);
  }
  if (w.p.makes_plan) PrepareOwnPlan(w, shared, memory);
  __syncthreads();
  WaitForPrevious();
  const int items =
      w.p.makes_plan ? MakeOwnPlan<S>(memory) : w.p.plan.totals[kMany] * w.work.num_heads;
  const bool works = static_cast<int>(blockIdx.x) < items;
  if (threadIdx.x < S::kProducerThreads) {
    LowerRegisters<S::kProducerRegisters>();
    if (!works) return;
    const int warp = threadIdx.x / 32;
    if constexpr (S::kDirect) {
      if constexpr (S::kGathers) {
        if (w.gathers) return GatherKeys(w, shared, items);
      }
      if (warp == 0) LoadKeys<S, false>(w, shared);
      if (warp == 1) LoadKeys<S, true>(w, shared);
      if (warp == shared.Leader(false)) LoadQueries(w, shared, items);
    } else {
      Convert<Out>(w, shared, items);
    }
  } else {
    RaiseRegisters<S::kConsumerRegisters>();
    if (works) Consume<Product, Out, kDims>(w, shared);
    // At the end: a launch fetches the next kernel's instructions, which take the place of these.
    // And not before WaitForPrevious(): the engine for few queries, which comes next, relies on all
    // that came before this kernel, and on what its plan says, and does not wait for it.
    TriggerNext();
  }
#endif
}

// From here on, but for the functions that the engine has for others, a problem is one on the
// copies of keys, if it has any.

// Whether heads do not all begin and end at multiples of 16 bytes.
bool HasOddHeads(const Problem& p) { return !p.kv_vectors() || p.q_unit != 16 || p.out_unit != 16; }

WideKeys KeysOf(const Problem& p) {
  if (!IsFp8(p.kv_dtype)) return WideKeys::kDirect;
  if (HasOddHeads(p)) return WideKeys::kWidened;  // with queries of any dtype
  const bool all_e4m3 = p.q_dtype == FLASHXLA_F8E4M3 && p.kv_dtype == FLASHXLA_F8E4M3;
  if (all_e4m3) return WideKeys::kFp8;
  return IsFp8(p.q_dtype) ? WideKeys::kAllWidened : WideKeys::kWidened;
}

int ValueDimsOf(const Problem& p) {
  const int dims = WideHeadSizes::Bucket(p.LargerHeadSize());
  return IsWidened(KeysOf(p)) ? dims : WideValueDims(dims, p.v.head_size);
}

// Keys that threads copy, since TMA takes longer.
bool Gathers(const Problem& p) {
  const int dims = WideHeadSizes::Bucket(p.LargerHeadSize());
  const int least = WideLeastBoxKeys(dims, KeysOf(p));
  return KeysOfBox(p, least) < least;
}

// Why the engine cannot serve odd heads; "" if it can.
const char* WhyNotOddHeads(const Problem& p) {
  if (p.kv_unit == 0 || p.q_unit == 0 || !p.out_pairs) {
    return "strides, addresses or the head size are not multiples of 4 bytes";
  }
  if (!p.kv_near) return "heads not of whole 16 bytes, in a large cache";
  const bool fp8 = IsFp8(p.kv_dtype);
  if (p.alibi_slopes.data != nullptr && !fp8) return "ALiBi, with heads not of whole 16 bytes";
  return "";
}

const char* WhyNotWide(const Facts& facts) {
  const Problem p = OnKeyCopies(facts.problem);
  if (const char* why = WhyNot16Bit(p); why[0] != '\0') return why;
  if (!LoadedImage().hopper) return WhyNoHopper();
  if (IsFp8(p.q_dtype) && !IsFp8(p.kv_dtype)) return "fp8 queries of 16-bit keys";
  if (const char* why = WhyNoKeys(p); why[0] != '\0') return why;
  if (HasOddHeads(p)) return WhyNotOddHeads(p);
  if (const char* why = WhyNoCacheBoxes(p, 1); why[0] != '\0') return why;
  if (Gathers(p) && !p.kv_near) return "pages that are no multiple of 8 tokens, in 64 GiB or more";
  if (!TakesStride(p.num_heads, p.q.stride_head) || !TakesStride(p.num_tokens, p.q.stride_token)) {
    return "TMA does not support the strides of the queries";
  }
  return "";
}

// Whether q tiles could have all query heads of a KV head, but for the lengths of the call: few of
// their rows stay unused, and one slope of ALiBi is enough.
bool CanPack(const Problem& p, int q_tile_rows) {
  const int group = p.group_size;
  return group > 1 && group <= q_tile_rows && q_tile_rows % group <= q_tile_rows / 8 &&
         p.alibi_slopes.data == nullptr;
}

// How the engine works where the keys of q tiles are not divided.
ManyShape WholeWork(const Problem& p, WideScores scores) {
  const int dims = WideHeadSizes::Bucket(p.LargerHeadSize());
  const WideKeys keys = KeysOf(p);
  ManyShape shape = {64 * WideConsumers(dims, keys, scores), WideKvTileKeys(ValueDimsOf(p), keys),
                     p.num_heads, NumMultiprocessors()};
  shape.odd_heads = HasOddHeads(p);
  if (p.batch_invariant) shape.min_queries = 1;  // it serves every sequence
  return shape;
}

// What the instance has code for that may pack q tiles and divide keys.
WideScores PartScores(const Problem& p) {
  if (HasOddHeads(p)) return WideScores::kOdd;
  return KeysOf(p) == WideKeys::kDirect ? WideScores::kMore : WideScores::kAny;
}

// The same with all heads of a KV head in a q tile, if they fit.
ManyShape PackedWork(const Problem& p) {
  ManyShape shape = WholeWork(p, PartScores(p));
  if (CanPack(p, shape.q_tile_tokens)) {
    shape.packs = true, shape.num_heads = p.num_kv_heads;
    shape.q_tile_tokens /= p.group_size;
    if (!p.batch_invariant) shape.min_queries = kMinPackedQueries;
  }
  return shape;
}

// Whether the call's instance has code for several heads in a q tile, and for dividing keys. That
// for ALiBi has no room for it.
bool HasParts(const Problem& p) {
  return KeysOf(p) != WideKeys::kDirect || p.alibi_slopes.data == nullptr;
}

// Whether the sums of rows are formed of fixed parts of the keys.
bool HasFixedParts(const Problem& p) { return p.batch_invariant && HasParts(p); }

// The most fixed parts of a q tile.
int MaxFixedParts(const Problem& p, const ManyShape& shape) {
  const int64_t last_key = std::max<int64_t>(p.index.capacity - 1, 0);
  const int last = static_cast<int>(last_key / shape.kv_tile_keys);
  return FixedPart::Of(last, shape.kv_tile_keys).index + 1;
}

// Whether the plan may divide the keys of q tiles. With fewer keys, or more q tiles, it does not.
bool MayDivide(const Problem& p) {
  if (!HasParts(p)) return false;
  const ManyShape shape = PackedWork(p);
  const int64_t sequences = p.index.num_sequences, tokens = p.num_tokens;
  const int64_t most =
      tokens / shape.q_tile_tokens + std::min(sequences, tokens / shape.min_queries);
  if (most * shape.num_heads > 2 * kMaxPartials) return false;
  return p.batch_invariant
             ? MaxFixedParts(p, shape) > 1
             : p.index.capacity > int64_t{kMinDividedKvTiles - 1} * shape.kv_tile_keys;
}

// About how many q tiles a call has. Unless the sequences are alike, the last one of each is taken
// to be half full.
float NumTiles(const Problem& p, const ManyShape& shape) {
  const int64_t sequences = p.index.num_sequences, tokens = shape.q_tile_tokens;
  const bool alike = p.num_tokens == sequences * p.max_queries;
  const float each =
      alike ? static_cast<float>((p.max_queries + tokens - 1) / tokens)
            : std::max(static_cast<float>(p.num_tokens) / (sequences * tokens) + .5f, 1.f);
  return each * sequences * shape.num_heads;
}

// Whether q tiles have all heads of a KV head because sequences are short: so they are fewer. If
// they are not, it is a bit slower; more than that where the instance has code for all, or where
// a kernel has to make the plan then.
bool PacksShort(const Problem& p) {
  if (!HasParts(p) || p.index.num_sequences == 0) return false;
  const ManyShape whole = WholeWork(p, PartScores(p)), packed = PackedWork(p);
  if (!packed.packs) return false;
  const float num_whole = NumTiles(p, whole);
  const float slower = KeysOf(p) == WideKeys::kDirect ? 1.06f : 1.25f;
  auto plans_itself = [&](const ManyShape& shape) {
    return FitsOwnPlan(shape, p.index.num_sequences, p.num_tokens);
  };
  const float plan = plans_itself(whole) && !plans_itself(packed) ? 1000.f : 0.f;
  return num_whole > whole.num_blocks && slower * NumTiles(p, packed) + plan < num_whole;
}

// What the call's instance has code for, if its work packs or divides q tiles as `work` says.
WideScores ScoresOf(const Problem& p, const ManyShape& work) {
  if (HasOddHeads(p)) return WideScores::kOdd;
  if (p.alibi_slopes.data != nullptr) return WideScores::kAny;
  const bool has_softcap = p.softcap > 0.f, gathers = Gathers(p);
  const bool has_parts = p.batch_invariant || work.divides;
  if (!has_parts && !work.packs && !gathers && !has_softcap) return WideScores::kPlain;
  if (KeysOf(p) != WideKeys::kDirect) return WideScores::kAny;
  if (has_parts) return p.batch_invariant ? WideScores::kFixed : WideScores::kMore;
  if (work.packs) return has_softcap || gathers ? WideScores::kMore : WideScores::kPacked;
  return gathers ? WideScores::kAny : WideScores::kMore;  // kAny has more registers for copies
}

// The room for results of parts of q tiles. As WideWork, it must not depend on the softcap, without
// which a plan is made.
struct PartialRoom {
  int groups;        // warpgroups of each result, which have a flag each
  int64_t partials;  // results
  int64_t sums;      // of fixed parts: as large as a result
  int64_t result_bytes;

  int64_t flags_at() const { return (partials + sums) * result_bytes; }
  int64_t num_bytes() const {
    constexpr int64_t kAlignment = 256;
    const int64_t bytes = flags_at() + partials * groups * int64_t{sizeof(uint64_t)};
    return RoundUp(bytes, kAlignment);
  }
};

PartialRoom RoomOf(const Problem& p) {
  PartialRoom room = {};
  const bool divides = MayDivide(p);
  if (!divides && !HasFixedParts(p)) return room;
  const ManyShape shape = PackedWork(p);
  room.groups = WideConsumers(WideHeadSizes::Bucket(p.LargerHeadSize()), KeysOf(p), PartScores(p));
  if (p.batch_invariant) {  // most results are of one token: no more than all rows of a KV head
    const int64_t rows = int64_t{p.num_tokens} * (shape.packs ? p.group_size : 1);
    room.groups = static_cast<int>(std::clamp<int64_t>((rows + 63) / 64, 1, room.groups));
  }
  room.result_bytes = int64_t{room.groups} * kWarpgroupThreads *
                      WidePartialVectors(ValueDimsOf(p)) * int64_t{sizeof(float4)};
  if (!p.batch_invariant) {
    room.partials = kMaxPartials;
  } else if (const int parts = MaxFixedParts(p, shape); parts > 1) {
    room.sums = NumMultiprocessors();
    constexpr int64_t kMostBytes = 64 << 20;
    // Only q tiles of which there is room for two in a round are divided.
    if (divides) {
      room.partials = std::min(int64_t{kMaxPartials / 2} * parts, kMostBytes / room.result_bytes);
    }
  }
  return room;
}

int64_t WorkspaceBytes(const Problem& p) {
  return KeyCopiesBytes(p) + RoomOf(OnKeyCopies(p)).num_bytes();
}

// Whether each thread block has one q tile at most, of few sequences.
bool HasLoneTiles(const Problem& p, const ManyShape& work) {
  const int64_t sequences = p.index.num_sequences;
  const int64_t tiles = PlanLayout::MaxManyTiles(sequences, p.num_tokens, work.q_tile_tokens);
  return !work.divides && sequences <= kMaxLoneSequences &&
         tiles * work.num_heads <= work.num_blocks;
}

// w: its problem and work; the rest is filled in.
template <typename Product, typename Out, int kDims, int kValueDims, WideKeys kKeyKind,
          WideScores kScores>
bool Launch(WideProblem& w, void* workspace, cudaStream_t stream) {
  using S = WideShape<kDims, kValueDims, kKeyKind, kScores>;
  const Problem& p = w.p;
  w.box_keys = KeysOfBox(p, S::kKeys);
  w.block_size = FastDivide(p.block_table.block_size);
  w.num_heads = FastDivide(w.work.num_heads);
  w.packed_heads = FastDivide(w.work.packs ? p.group_size : 1);
  const bool loads = p.kv_vectors() && w.box_keys >= S::kLeastBoxKeys;
  w.gathers = S::kGathers && !loads;
  w.has_lone_tiles = p.makes_plan && HasLoneTiles(p, w.work);
  const int columns = S::kDirect ? S::kBlockColumns : S::kRawColumns;
  if (!S::kOddHeads &&
      !MapQueries(p, S::kLoadedQueryColumns, w.packed_heads.divisor, w.work.q_tile_tokens, &w.q)) {
    return false;
  }
  if (p.kv_vectors() && (!MapCache(p, p.k, columns, w.box_keys, false, &w.k) ||
                         !MapCache(p, p.v, columns, w.box_keys, false, &w.v))) {
    return false;
  }
  const PartialRoom room = RoomOf(p);
  w.partials = static_cast<float4*>(workspace);
  w.flags = reinterpret_cast<uint64_t*>(static_cast<char*>(workspace) + room.flags_at());
  w.result_groups = room.groups;
  w.sums = static_cast<int>(room.partials);
  w.tag = NewCallTag();
  auto* kernel = WideKernel<Product, Out, kDims, kValueDims, kKeyKind, kScores>;
  LaunchDependent(kernel, NumMultiprocessors(), S::kThreads, S::kBytes, stream, w);
  return true;
}

// Launches the instance for what ScoresOf says.
template <typename Product, typename Out, int kDims, int kValueDims, WideKeys kKeyKind>
bool LaunchScores(WideProblem& w, WideScores scores, void* workspace, cudaStream_t stream) {
  using Scores = WideScores;
  auto launch = [&](auto which) {
    return Launch<Product, Out, kDims, kValueDims, kKeyKind, decltype(which)::value>(w, workspace,
                                                                                     stream);
  };
  if (scores == Scores::kPlain) return launch(std::integral_constant<Scores, Scores::kPlain>{});
  if constexpr (kKeyKind == WideKeys::kDirect) {
    if (scores == Scores::kPacked) return launch(std::integral_constant<Scores, Scores::kPacked>{});
    if (scores == Scores::kMore) return launch(std::integral_constant<Scores, Scores::kMore>{});
    if (scores == Scores::kFixed) return launch(std::integral_constant<Scores, Scores::kFixed>{});
  }
  if constexpr (kKeyKind == WideKeys::kDirect || kKeyKind == WideKeys::kWidened) {
    if (scores == Scores::kOdd) return launch(std::integral_constant<Scores, Scores::kOdd>{});
  }
  return launch(std::integral_constant<Scores, Scores::kAny>{});
}

ManyShape WorkOf(const Problem& p) {
  const bool divides = MayDivide(p);
  ManyShape shape = divides || HasFixedParts(p) || HasOddHeads(p) || PacksShort(p)
                        ? PackedWork(p)
                        : WholeWork(p, ScoresOf(p, {}));
  shape.divides = divides;
  if (divides && p.batch_invariant) {
    shape.fixed_parts = MaxFixedParts(p, shape);
    shape.fixed_partials = static_cast<int32_t>(RoomOf(p).partials);
  }
  return shape;
}

flashxla_status LaunchWide(const Problem& given, void* workspace, cudaStream_t stream) {
  Problem p = given;
  if (CopiesKeys(given)) {  // they come first in the workspace
    p = MakeKeyCopies(given, kMany, workspace, stream);
    workspace = static_cast<char*>(workspace) + KeyCopiesBytes(given);
  }
  bool launched = false;
  WideProblem w = {};
  w.p = p, w.work = WorkOf(p);
  const WideScores scores = ScoresOf(p, w.work);
  const WideKeys keys = KeysOf(p);
  WithInstance<WideHeadSizes>(p, [&](auto t, auto dims, auto is_fp8) {
    using Out = typename decltype(t)::type;
    constexpr int kDims = decltype(dims)::value;
    constexpr int kFewValueDims = WideValueDims(kDims, 1);
    const bool few_value_dims = ValueDimsOf(p) != kDims;
    if constexpr (!decltype(is_fp8)::value) {
      constexpr WideKeys kKeys = WideKeys::kDirect;
      launched =
          few_value_dims
              ? LaunchScores<Out, Out, kDims, kFewValueDims, kKeys>(w, scores, workspace, stream)
              : LaunchScores<Out, Out, kDims, kDims, kKeys>(w, scores, workspace, stream);
    } else if (keys == WideKeys::kWidened) {
      constexpr WideKeys kKeys = WideKeys::kWidened;
      launched = LaunchScores<Out, Out, kDims, kDims, kKeys>(w, scores, workspace, stream);
    } else if constexpr (std::is_same_v<Out, __nv_bfloat16>) {  // of fp8 queries
      using E4m3 = __nv_fp8_e4m3;
      if (keys == WideKeys::kAllWidened) {
        constexpr WideKeys kKeys = WideKeys::kAllWidened;
        launched = LaunchScores<Out, Out, kDims, kDims, kKeys>(w, scores, workspace, stream);
      } else {
        constexpr WideKeys kKeys = WideKeys::kFp8;
        launched =
            few_value_dims
                ? LaunchScores<E4m3, Out, kDims, kFewValueDims, kKeys>(w, scores, workspace, stream)
                : LaunchScores<E4m3, Out, kDims, kDims, kKeys>(w, scores, workspace, stream);
      }
    }
  });
  if (launched) return FLASHXLA_OK;
  return SetError(FLASHXLA_DEVICE_ERROR, "the driver refuses a tensor map of q, k or v");
}

}  // namespace

ManyShape WideWork(const Problem& p) {
  ManyShape shape = WorkOf(OnKeyCopies(p));
  shape.copies_keys = CopiesKeys(p);
  return shape;
}

bool FitsOwnPlan(const ManyShape& shape, int64_t num_sequences, int64_t num_tokens) {
  const int64_t tiles = PlanLayout::MaxManyTiles(num_sequences, num_tokens, shape.q_tile_tokens);
  return num_sequences <= kMaxOwnSequences && tiles <= kMaxOwnTiles &&
         tiles * shape.num_heads <= int64_t{kMaxOwnRounds} * shape.num_blocks;
}

const Engine kWideEngine = {
    "wide", "Hopper tensor cores (wgmma), TMA", kMany, WhyNotWide, WorkspaceBytes, LaunchWide};

}  // namespace flashxla::attention
