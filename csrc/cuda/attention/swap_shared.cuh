// What swap's warps share: the stages in shared memory, what is kept of each row, and the producer
// warp that fills the stages by TMA.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_SHARED_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_SHARED_CUH_

#include <algorithm>

#include "common/attention_arguments.h"
#include "cuda/attention/dispatch.cuh"
#include "cuda/attention/hopper.cuh"
#include "cuda/attention/mma.cuh"
#include "cuda/attention/own_plan.cuh"
#include "cuda/attention/split.cuh"
#include "cuda/attention/warp.cuh"
#include "cuda/fast_divide.h"

namespace flashxla::attention {

constexpr int kSwapGroupWarps = kWarpgroupThreads / 32;
// Named barriers: of a warpgroup, and of all consumer warps.
__device__ inline int SwapBarrier(int group) { return 1 + group; }
constexpr int kSwapConsumers = 3;

struct SwapProblem {
  CUtensorMap k, v;
  Problem p;
  int box_keys;                 // keys per TMA box, which lies in one page
  bool q_vectors, out_vectors;  // queries can be read, outputs written, in vectors of 16 bytes
  FastDivide num_blocks;        // of a KV head
  uint64_t tag;                 // what a flag of the workspace says in this call
};

// What is kept of the rows that a warpgroup has of a q tile.
template <int kRows>
struct SwapRows {
  int64_t diagonal[kRows];              // position of the row among the keys
  KeyRange keys[kRows];                 // that the row sees
  float slope[kRows];                   // ALiBi
  float power[kRows];                   // of two, by which the queries were divided
  float row_max[kRows], factor[kRows];  // at the end
  float exchange[kSwapGroupWarps][kRows];
};

// What an own plan sums up of the sequences with few queries.
struct OwnTotals {
  unsigned steps = 0, most_steps = 0, fewest_steps = ~0u;
  unsigned least = 0;  // the largest LeastFewShare

  OwnTotals() = default;
  // Of one sequence.
  __device__ OwnTotals(unsigned sequence_steps, unsigned sequence_least)
      : steps(sequence_steps),
        most_steps(sequence_steps),
        fewest_steps(sequence_steps > 0 ? sequence_steps : ~0u),
        least(sequence_steps > 0 ? sequence_least : 0) {}
  // Of all lanes, which must call it together.
  __device__ OwnTotals OfWarp() const {
    OwnTotals all;
    all.steps = __reduce_add_sync(kAllLanes, steps);
    all.most_steps = __reduce_max_sync(kAllLanes, most_steps);
    all.fewest_steps = __reduce_min_sync(kAllLanes, fewest_steps);
    all.least = __reduce_max_sync(kAllLanes, least);
    return all;
  }
};

enum class SwapKind {
  kUsual,
  kPairsOf80,  // two heads of so many dims at a time
  kPairsOf96,
  kManyShort,  // with room for a third thread block, and none for a plan of its own
  kCopied,     // threads copy the keys: TMA cannot, or takes longer
};

// Product: the dtype of the matrix products; Out: of the output and of 16-bit queries. They differ
// for bf16 queries with fp8 keys: fp8 is widened to f16.
//
// In shared memory keys, values and queries lie in blocks of columns, i.e. rows of 128 bytes with
// TMA's swizzle. The weights, i.e. the keys' shares in the output, are [rows, keys].
//
// Of a pair of heads a row of keys or values has the columns of both.
template <typename ProductType, typename OutType, int kHeadDims, bool kIsFp8, int kMostRows,
          SwapKind kKind = SwapKind::kUsual>
struct SwapShape {
  using Product = ProductType;
  using Out = OutType;
  static constexpr int kDims = kHeadDims;
  static constexpr int kValueDims = std::min(kDims, static_cast<int>(kMaxValueHeadSize));
  static constexpr bool kFp8 = kIsFp8;
  static constexpr int kMaxRows = kMostRows;  // of a q tile
  // Many rows are shared by two warpgroups, so that they read keys from memory once.
  static constexpr int kGroups = kMaxRows > 64 ? 2 : 1;
  static constexpr int kGroupRows = kMaxRows / kGroups;
  static constexpr int kConsumerWarps = kGroups * kSwapGroupWarps;
  static constexpr bool kCopied = kKind == SwapKind::kCopied;
  // Of large heads a stage is a block of keys or values, not those of a whole step.
  static constexpr bool kStreams = kDims > kMaxUsualHeadSize;
  static_assert(!kStreams || (kCopied && kGroups == 1));
  static constexpr int kThreadBlocks =
      kKind == SwapKind::kManyShort ? kManyShortBlocksEach : FewBlocksEach(kDims, kMaxRows);
  // Two warpgroups need registers that a whole third one, with the producer warps, gives up; so do
  // two thread blocks with a whole warpgroup of producers each.
  static constexpr bool kMoveRegisters = kGroups > 1 || (kCopied && kThreadBlocks > 1);
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = kGroups > 1 ? 224 : 200;
  static constexpr int kProducerWarps = kCopied ? kSwapGroupWarps : 1;
  // How thread blocks combine what they share: see swap_combine_many.cuh. The instances for few
  // rows can do both.
  static constexpr bool kCombinesMany = kMaxRows > kSplitQTileRows;
  static constexpr int kConsumerThreads = 32 * kConsumerWarps;
  static constexpr int kThreads =
      kConsumerThreads + 32 * (kMoveRegisters ? kSwapGroupWarps : kProducerWarps);
  static constexpr int kRowBytes = 128;
  static constexpr int kBlockDims = kFp8 ? 128 : 64;  // of keys and values
  // Of a pair's heads; 0 if there are none.
  static constexpr int kPairedDims = kKind == SwapKind::kPairsOf80   ? 80
                                     : kKind == SwapKind::kPairsOf96 ? 96
                                                                     : 0;
  static constexpr bool kPairs = kPairedDims > 0;
  static constexpr int kBlocks = ((kPairs ? 2 * kPairedDims : kDims) + kBlockDims - 1) / kBlockDims;
  static constexpr int kValueBlocks = kPairs ? kBlocks : kValueDims / kBlockDims;
  // Steps of 16 columns of a head, and tiles of 64 columns of the output.
  static constexpr int kColumnSteps = (kPairs ? kPairedDims : kDims) / 16;
  static constexpr int kOutTiles = kPairs ? kBlocks : kValueDims / 64;
  static constexpr int kBlockBytes = kFewKvTileKeys * kRowBytes;
  static constexpr int kHalfBytes = kBlocks * kBlockBytes;  // the keys of a stage, or the values
  static constexpr int kStageBytes = kStreams ? kBlockBytes : 2 * kHalfBytes;
  static constexpr int kQueryDims = kStreams ? kBlocks * kBlockDims : kDims;
  static constexpr int kQueryBytes = kGroupRows * kQueryDims * 2;  // of a warpgroup
  static constexpr int kWeightBytes = kGroupRows * kRowBytes;
  using Rows = SwapRows<kGroupRows>;
  static constexpr bool kMakesPlan = kKind != SwapKind::kManyShort;
  static constexpr int kMaxStages = kStreams ? 24 : 6;
  // Three barriers and two masks for each stage.
  static constexpr int kFixedBytes =
      kGroups * (kQueryBytes + kWeightBytes + int{sizeof(Rows)}) + 5 * 8 * kMaxStages +
      (kMakesPlan ? kMaxOwnSequences * int{sizeof(PlannedSequence)} +
                        kMaxOwnSequences / 32 * int{sizeof(OwnTotals)}
                  : 0);
  static constexpr int kBudget = 228 * 1024 / kThreadBlocks - 1024;
  // More on the way at a time than this make memory slower; of what threads copy it may be more.
  static constexpr int kMostStageBytes =
      kStreams ? kMaxStages * kStageBytes : (kThreadBlocks > 1 ? kCopied ? 96 : 64 : 128) * 1024;
  static constexpr int kStages = std::min({(kBudget - kFixedBytes) / kStageBytes,
                                           std::max(kMostStageBytes / kStageBytes, 2), kMaxStages});
  static constexpr int kBytes = kFixedBytes + kStages * kStageBytes;
  static_assert(kStages >= 2);

  // Blocks of keys that have columns of a call's heads.
  __device__ static int KeyBlocks(const Problem& p) {
    return (p.k.head_size + kBlockDims - 1) / kBlockDims;
  }
};

#if defined(FLASHXLA_HOPPER)

template <typename S>
struct SwapShared {
  char* base;
  uint32_t address;

  // shared: at a multiple of 1024 bytes.
  __device__ explicit SwapShared(char* shared) : base(shared), address(SharedAddress(shared)) {}
  // Keys, then values.
  __device__ uint32_t stage(int i) const { return address + i * S::kStageBytes; }
  __device__ char* stage_data(int i) const { return base + i * S::kStageBytes; }
  __device__ uint32_t queries(int group) const {
    return stage(S::kStages) + group * S::kQueryBytes;
  }
  __device__ uint32_t weights(int group) const {
    return queries(S::kGroups) + group * S::kWeightBytes;
  }
  __device__ typename S::Rows& rows(int group) const {
    char* first = base + (weights(S::kGroups) - address);
    return reinterpret_cast<typename S::Rows*>(first)[group];
  }
  // Which keys of a stage exist and are not left padding. Of a step where a step has several
  // stages: as many steps as there are stages are more than can be on the way.
  __device__ uint64_t& mask(int i) const {
    return reinterpret_cast<uint64_t*>(&rows(S::kGroups))[i];
  }
  // The same of the 16 keys that a warp copies.
  __device__ uint16_t& mask(int i, int warp) const {
    return reinterpret_cast<uint16_t*>(&mask(i))[warp];
  }
  // Which do not, though their boxes are there.
  __device__ uint64_t& stale(int i) const { return (&mask(S::kStages))[i]; }
  // Keys and values come one after the other: the scores need not wait for the values.
  __device__ uint32_t keys_full(int i) const {
    return weights(S::kGroups) + S::kGroups * int{sizeof(typename S::Rows)} +
           8 * (2 * S::kStages + i);
  }
  __device__ uint32_t values_full(int i) const { return keys_full(S::kStages + i); }
  __device__ uint32_t empty(int i) const { return values_full(S::kStages + i); }
  // Of a plan that the engine makes itself; totals: of every 32 sequences.
  __device__ PlannedSequence* sequences() const {
    return reinterpret_cast<PlannedSequence*>(base + (empty(S::kMaxStages) - address));
  }
  __device__ OwnTotals* totals() const {
    return reinterpret_cast<OwnTotals*>(sequences() + kMaxOwnSequences);
  }

  __device__ void InitBarriers() const {
    // Of copied keys each thread, and a lane of each warp for the mask.
    constexpr int kCopies = 32 * S::kProducerWarps;
    for (int i = 0; i < S::kStages; ++i) {
      InitBarrier(keys_full(i), S::kCopied ? kCopies + S::kProducerWarps : 1);
      InitBarrier(values_full(i), S::kCopied ? kCopies : 1);
      InitBarrier(empty(i), S::kConsumerThreads);
    }
    FenceProxy();
  }
};

// The boxes of the next steps of a q tile, a lane each: where they lie. Find only starts to load
// the block table's entries; it is called ahead, to hide the latency.
struct SwapBoxes {
  int steps;  // how many
  int block, token;
  bool inside;     // the box has a key of the sequence
  int first_key;   // of the first step
  int first, end;  // the keys of the sequence that exist and are not left padding

  __device__ static SwapBoxes Find(const SwapProblem& w, const Cursor& at) {
    const Problem& p = w.p;
    const PlannedSequence& s = at.sequence;
    const int lane = threadIdx.x & 31;
    SwapBoxes boxes;
    boxes.steps = min(w.box_keys / 2, min(at.tile_end, at.end) - at.step);
    boxes.first_key = at.first_key();
    boxes.first = s.first_key, boxes.end = s.num_keys;
    const int j = boxes.first_key + lane * w.box_keys;
    boxes.inside = j < s.num_keys && lane * w.box_keys < boxes.steps * kFewKvTileKeys;
    boxes.token = s.key_row + j;
    boxes.block = 0;
    if (p.block_table.data != nullptr) {
      const int page = p.PageOf(j);
      boxes.token = j - page * p.block_table.block_size;
      if (boxes.inside) boxes.block = Entry(p.block_table, at.index, page);
    }
    return boxes;
  }

  // A box that is not there lies outside the cache from now on, and so becomes zeros. Returns the
  // lanes of these. All lanes must call it.
  __device__ unsigned Resolve(const SwapProblem& w) {
    const bool there = inside && IsSound(w.p.block_table, block);
    if (!there) block = w.p.block_table.num_blocks, token = 0;
    return __ballot_sync(kAllLanes, !there);
  }

  // Which keys of a step exist, or would if their boxes were there.
  __device__ uint64_t MaskOf(int step) const {
    const int key = first_key + step * kFewKvTileKeys;
    const int low = max(first - key, 0), high = min(end - key, kFewKvTileKeys);
    return low < high ? ~uint64_t{0} >> (64 - (high - low)) << low : 0;
  }
  // The keys of some of a step's boxes.
  __device__ static uint64_t KeysOf(const SwapProblem& w, unsigned boxes) {
    uint64_t keys = 0;
    for (; boxes != 0; boxes &= boxes - 1) {
      keys |= ~uint64_t{0} >> (64 - w.box_keys) << (__ffs(boxes) - 1) * w.box_keys;
    }
    return keys;
  }
};

// The producer warp: fills the stages with the keys and values of the block's steps.
template <typename S>
__device__ void SwapProduce(const SwapProblem& w, const SwapShared<S>& shared,
                            const SequenceList& sequences, const FewBlock& block, int kv_head) {
  const int lane = threadIdx.x & 31;
  const int boxes = kFewKvTileKeys / w.box_keys;  // of a step
  Cursor at(w.p, sequences, block);
  SwapBoxes next = SwapBoxes::Find(w, at);
  int stage = 0;
  uint32_t parity = 1;
#pragma unroll 1
  for (bool more = true; more;) {
    SwapBoxes now = next;
    const unsigned absent = now.Resolve(w);
#pragma unroll 1
    for (int step = 0; step < now.steps; ++step) {
      const int first_box = step * boxes, box = lane - first_box;
      WaitBarrier(shared.empty(stage), parity);
      if (lane == 0) {
        Expect(shared.keys_full(stage), S::kHalfBytes);
        Expect(shared.values_full(stage), S::kHalfBytes);
      }
      __syncwarp();
      auto load = [&](const CUtensorMap* map, uint32_t to, uint32_t full) {
        if (box < 0 || box >= boxes) return;
#pragma unroll
        for (int column = 0; column < S::kBlocks; ++column) {
          LoadBox4(to + box * w.box_keys * S::kRowBytes + column * S::kBlockBytes, map, full,
                   column * S::kBlockDims, kv_head, now.token, now.block);
        }
      };
      load(&w.k, shared.stage(stage), shared.keys_full(stage));
      load(&w.v, shared.stage(stage) + S::kHalfBytes, shared.values_full(stage));
      // What else is to be found comes after the copies have started.
      if (lane == 0) {
        const uint64_t gone = SwapBoxes::KeysOf(w, absent >> first_box & (1u << boxes) - 1);
        const uint64_t mask = now.MaskOf(step) & ~gone;
        shared.mask(stage) = mask, shared.stale(stage) = ~(mask | gone);
        Arrive(shared.keys_full(stage));
        Arrive(shared.values_full(stage));
      }
      if (step == 0) {
        at.step += now.steps - 1;
        at.Next(w.p);
        more = at.step < at.end;
        if (more) next = SwapBoxes::Find(w, at);
      }
      if (++stage == S::kStages) stage = 0, parity ^= 1;
    }
  }
}

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_SHARED_CUH_
