// What wide's warps share: its work items, its stages in shared memory, and the loads.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_WIDE_SHARED_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_WIDE_SHARED_CUH_

#include "cuda/attention/hopper.cuh"
#include "cuda/attention/mma.cuh"
#include "cuda/attention_backward/problem.cuh"
#include "cuda/attention_backward/wide_sums.h"

namespace flashxla::attention_backward {

// In shared memory rows lie in blocks of 64 columns, i.e. rows of 128 bytes.
constexpr int kBlockColumns = 64;
constexpr int kRowBytes = 128;
constexpr int kRowBlockBytes = kRowTile * kRowBytes;
// Of the rows of a tile, float32: their lse2 or their delta.
constexpr int kScalarBytes = kRowTile * 4;

// A work item: a key tile of a sequence and a KV head.
struct alignas(16) WideItem {
  int kv_head;
  int steps;              // row tiles times heads of the group; < 0: there are no more items
  int first_key;          // position of the key tile
  int key_row;            // row of k of the sequence's position 0
  int low_key, high_key;  // positions of the sequence's keys
  int num_queries;
  int offset;                // from a query to its own position
  int first_tile, end_tile;  // the row tiles, among the sequence's
  int first_row;             // row of q of the sequence's first query
  int row_tiles;             // row tiles of the sequences before
  int sequence;

  // Queries [FirstQuery, EndQuery) see the key at position j, if it exists.
  __device__ int FirstQuery(const Window& window, int j) const {
    if (window.right < 0) return 0;
    return static_cast<int>(max(int64_t{j} - window.right - offset, int64_t{0}));
  }
  __device__ int EndQuery(const Window& window, int j) const {
    if (window.left < 0) return num_queries;
    const int64_t end = int64_t{j} + window.left - offset + 1;
    return static_cast<int>(max(min(end, int64_t{num_queries}), int64_t{0}));
  }
};

// A step of an item, a row tile of a head: what the consumers must know.
struct alignas(16) WideStep {
  int first_query;  // of the row tile, in its sequence
  int num_rows;     // of the sequence from there on
  float slope2;     // ALiBi's, in log2; 0: there is none
};

// Keys of a key tile.
constexpr int WideKeyTile(int dims) { return dims > 128 ? 64 : 128; }

template <int kDimsOf, int kValueDimsOf>
struct WideShape {
  static constexpr int kDims = kDimsOf, kValueDims = kValueDimsOf;
  static constexpr int kKeyTile = WideKeyTile(kDims);
  static constexpr int kStages = 2;  // of queries, and of weights and the scores' gradients
  static constexpr int kGradOutStages = kDims > 192 ? 1 : 2;
  static constexpr int kBlocks = kDims / kBlockColumns;
  static constexpr int kValueBlocks = kValueDims / kBlockColumns;
  static constexpr int kKeyBlockBytes = kKeyTile * kRowBytes;
  static constexpr int kKeyBytes = kBlocks * kKeyBlockBytes;
  static constexpr int kValueBytes = kValueBlocks * kKeyBlockBytes;
  static constexpr int kQueryBytes = kBlocks * kRowBlockBytes;
  static constexpr int kGradOutBytes = kValueBlocks * kRowBlockBytes;
  // Gradients of a tile's scores; with heads above 128 the weights, too.
  static constexpr int kScoreBytes = (kDims > 128 ? 2 : 1) * kKeyBlockBytes;
  // Sums of grad_q of a row tile of a head, float32, and the part of them that is added at once.
  static constexpr int kSums = kRowTile * kDims, kSumParts = WideSumParts(kDims);
  static constexpr int kSumBytes = 4 * kSums / kSumParts;
  static constexpr int kBarriers = 4 + 2 * kStages + 2 * kGradOutStages;
  // Of what is small, before the tiles: rows' scalars, the item, steps, barriers.
  static constexpr int kSmallBytes =
      (((kStages + kGradOutStages) * kScalarBytes + static_cast<int>(sizeof(WideItem)) +
        kStages * static_cast<int>(sizeof(WideStep)) + 8 * kBarriers) +
       1023) /
      1024 * 1024;
  // Aligning the tiles may take up to 1 KB.
  static constexpr int kBytes = 1024 + kSmallBytes + kKeyBytes + kValueBytes +
                                kStages * (kQueryBytes + kScoreBytes) +
                                kGradOutStages * kGradOutBytes + kSumBytes;
  static_assert(kBytes <= 227 * 1024);
};

struct WideProblem {
  CUtensorMap q, k, v, grad_out;
  Problem p;
};

#if defined(FLASHXLA_HOPPER)

using attention::LoadShared;

// Which stage of a ring number n uses, and the parity of the stage's barriers.
template <int kStages>
struct Turn {
  int stage;
  uint32_t parity;

  __device__ explicit Turn(uint32_t n) : stage(n % kStages), parity(n / kStages % 2) {}
};

// Addresses in shared memory.
template <typename S>
struct WideShared {
  uint32_t base;

  __device__ explicit WideShared(const char* shared)
      : base((attention::SharedAddress(shared) + 1023) / 1024 * 1024) {}
  __device__ uint32_t lse2(int stage) const { return base + stage * kScalarBytes; }
  __device__ uint32_t delta(int stage) const { return lse2(S::kStages + stage); }
  __device__ uint32_t item() const { return lse2(S::kStages + S::kGradOutStages); }
  __device__ uint32_t step(int stage) const {
    return item() + static_cast<int>(sizeof(WideItem) + stage * sizeof(WideStep));
  }
  __device__ uint32_t keys() const { return base + S::kSmallBytes; }
  __device__ uint32_t values() const { return keys() + S::kKeyBytes; }
  __device__ uint32_t queries(int stage) const {
    return values() + S::kValueBytes + stage * S::kQueryBytes;
  }
  __device__ uint32_t grad_out(int stage) const {
    return queries(S::kStages) + stage * S::kGradOutBytes;
  }
  // Gradients of scores, by key; behind them weights, if they have room.
  __device__ uint32_t scores(int stage) const {
    return grad_out(S::kGradOutStages) + stage * S::kScoreBytes;
  }
  __device__ uint32_t sums() const { return scores(S::kStages); }
  // Barriers: "it is full" and "it is empty".
  __device__ uint32_t keys_full() const { return step(S::kStages); }
  __device__ uint32_t keys_empty() const { return keys_full() + 8; }
  __device__ uint32_t sums_full() const { return keys_full() + 16; }
  __device__ uint32_t sums_empty() const { return keys_full() + 24; }
  __device__ uint32_t queries_full(int i) const { return keys_full() + 32 + 8 * i; }
  __device__ uint32_t queries_empty(int i) const { return queries_full(S::kStages + i); }
  __device__ uint32_t grad_out_full(int i) const { return queries_full(2 * S::kStages + i); }
  __device__ uint32_t grad_out_empty(int i) const { return grad_out_full(S::kGradOutStages + i); }
};

// Stores a struct of 16-byte parts in shared memory.
template <typename T>
__device__ void StoreShared(uint32_t to, const T& x) {
  const auto* parts = reinterpret_cast<const uint4*>(&x);
#pragma unroll
  for (size_t i = 0; i < sizeof(T) / 16; ++i) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to + static_cast<int>(i) * 16),
                 "r"(parts[i].x), "r"(parts[i].y), "r"(parts[i].z), "r"(parts[i].w)
                 : "memory");
  }
}

__device__ inline void LoadBytes(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// Loads rows [first, first + kRows) of a head, and zeros for columns past the head size.
template <int kBlocks, int kRows>
__device__ void LoadRows(uint32_t to, const CUtensorMap* map, uint32_t barrier, int head,
                         int first) {
#pragma unroll
  for (int c = 0; c < kBlocks; ++c) {
    attention::LoadBox3(to + c * kRows * kRowBytes, map, barrier, c * kBlockColumns, head, first);
  }
}

// One thread of each of three warps moves data: the first loads keys, values and queries, the
// second grad_out, and the third adds sums of grad_q to those in memory. They have few registers.

// Fills in number `number` of the list of items, which starts with the most expensive ones. False
// if there are no more.
template <int kKeyTile>
__device__ bool FindItem(const Problem& p, int number, WideItem* item) {
  if (number >= p.plan.num_key_tiles() * p.num_kv_heads) return false;
  const int2 tile = p.plan.key_tiles[number / p.num_kv_heads];
  const PlannedSequence& s = p.plan.sequences[tile.x];
  item->kv_head = number % p.num_kv_heads;
  item->first_key = tile.y * kKeyTile, item->key_row = s.key_row;
  item->low_key = s.first_key, item->high_key = s.num_keys;
  item->sequence = tile.x, item->num_queries = s.num_queries,
  item->offset = s.length - s.num_queries;
  item->first_row = s.first_query, item->row_tiles = p.plan.row_tile_starts[tile.x];
  const int begin = item->FirstQuery(p.window, item->first_key);
  const int end = item->EndQuery(p.window, min(item->first_key + kKeyTile, item->high_key) - 1);
  item->first_tile = begin / kRowTile;
  item->end_tile = end > begin ? (end + kRowTile - 1) / kRowTile : item->first_tile;
  item->steps = (item->end_tile - item->first_tile) * p.group_size;
  return true;
}

// Calls body(steps, head, tile) for each step of an item, with the number of steps before. Row
// tiles come in descending order: under a causal mask all items of a head then start with the same
// one.
template <typename Body>
__device__ void ForEachStep(const Problem& p, const WideItem& item, uint32_t& steps, Body&& body) {
#pragma unroll 1
  for (int head = item.kv_head * p.group_size; head < (item.kv_head + 1) * p.group_size; ++head) {
#pragma unroll 1
    for (int tile = item.end_tile - 1; tile >= item.first_tile; --tile, ++steps) {
      body(steps, head, tile);
    }
  }
}

template <typename S>
__device__ void LoadKeysAndQueries(const WideProblem& w, const WideShared<S>& shared) {
  const Problem& p = w.p;
  uint32_t steps = 0;
#pragma unroll 1
  for (uint32_t items = 0;; ++items) {
    attention::WaitBarrier(shared.keys_empty(), items % 2 ^ 1);
    WideItem item = {};
    if (!FindItem<S::kKeyTile>(p, atomicAdd(p.plan.next_item, 1), &item)) {
      item.steps = -1;
      StoreShared(shared.item(), item);
      attention::Arrive(shared.keys_full());
      return;
    }
    StoreShared(shared.item(), item);
    attention::ArriveExpecting(shared.keys_full(), S::kKeyBytes + S::kValueBytes);
    const int row = item.key_row + item.first_key;
    LoadRows<S::kBlocks, S::kKeyTile>(shared.keys(), &w.k, shared.keys_full(), item.kv_head, row);
    LoadRows<S::kValueBlocks, S::kKeyTile>(shared.values(), &w.v, shared.keys_full(), item.kv_head,
                                           row);

    ForEachStep(p, item, steps, [&](uint32_t number, int head, int tile) {
      const Turn<S::kStages> turn(number);
      const uint32_t full = shared.queries_full(turn.stage);
      const int row_tile = item.row_tiles + tile;
      attention::WaitBarrier(shared.queries_empty(turn.stage), turn.parity ^ 1);
      const float slope2 = p.alibi_slopes.at(item.sequence, head, 0.f) * kLog2e;
      StoreShared(shared.step(turn.stage),
                  WideStep{tile * kRowTile, item.num_queries - tile * kRowTile, slope2});
      attention::ArriveExpecting(full, S::kQueryBytes + kScalarBytes);
      LoadRows<S::kBlocks, kRowTile>(shared.queries(turn.stage), &w.q, full, head,
                                     item.first_row + tile * kRowTile);
      LoadBytes(shared.lse2(turn.stage),
                p.lse2 + head * p.plan.num_rows() + int64_t{row_tile} * kRowTile, kScalarBytes,
                full);
    });
  }
}

// Calls body(item) for each item, while its keys are in shared memory.
template <typename S, typename Body>
__device__ void ForEachItem(const WideShared<S>& shared, Body&& body) {
#pragma unroll 1
  for (uint32_t items = 0;; ++items) {
    attention::WaitBarrier(shared.keys_full(), items % 2);
    const auto item = LoadShared<WideItem>(shared.item());
    if (item.steps < 0) return;
    body(item);
    attention::Arrive(shared.keys_empty());
  }
}

template <typename S>
__device__ void LoadGradOut(const WideProblem& w, const WideShared<S>& shared) {
  const Problem& p = w.p;
  uint32_t steps = 0;
  ForEachItem(shared, [&](const WideItem& item) {
    ForEachStep(p, item, steps, [&](uint32_t number, int head, int tile) {
      const Turn<S::kGradOutStages> turn(number);
      const uint32_t full = shared.grad_out_full(turn.stage);
      const int row_tile = item.row_tiles + tile;
      attention::WaitBarrier(shared.grad_out_empty(turn.stage), turn.parity ^ 1);
      attention::ArriveExpecting(full, S::kGradOutBytes + kScalarBytes);
      LoadRows<S::kValueBlocks, kRowTile>(shared.grad_out(turn.stage), &w.grad_out, full, head,
                                          item.first_row + tile * kRowTile);
      LoadBytes(shared.delta(turn.stage),
                p.delta + head * p.plan.num_rows() + int64_t{row_tile} * kRowTile, kScalarBytes,
                full);
    });
  });
}

__device__ inline void StartAdding(float* to, uint32_t from, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
      "r"(from), "r"(bytes)
      : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until shared memory has been read.
__device__ inline void WaitAddingRead() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// How many items add to the sums of a row tile before this one, where the bits must be the same
// each time: those of the key tiles before. Items come in that order in their list, so none waits
// for one that has not started.
template <int kKeyTile>
__device__ int TurnOf(const Problem& p, const WideItem& item, int first_query) {
  int64_t first_key = item.low_key;
  if (p.window.left >= 0) {
    first_key = max(first_key, int64_t{first_query} + item.offset - p.window.left);
  }
  return item.first_key / kKeyTile - static_cast<int>(first_key / kKeyTile);
}

// Waits until all but the last kPending additions are complete.
template <int kPending>
__device__ inline void WaitAdded() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// The turns of a row tile of a head that this thread has added to, which the next item waits for.
struct PassedTurn {
  int* turns = nullptr;

  __device__ void Pass() {
    if (turns == nullptr) return;
    asm volatile("fence.proxy.async;" ::: "memory");
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(turns) : "memory");
    turns = nullptr;
  }
};

// Waits for a turn; before it waits, passes the last one on.
__device__ inline void WaitTurn(const int* turns, int turn, PassedTurn& last) {
  for (;;) {
    int now;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(now) : "l"(turns) : "memory");
    if (now == turn) break;
    WaitAdded<0>();
    last.Pass();
  }
  asm volatile("fence.proxy.async;" ::: "memory");
}

template <typename S>
__device__ void AddSums(const WideProblem& w, const WideShared<S>& shared) {
  const Problem& p = w.p;
  uint32_t steps = 0;
  PassedTurn last;
  ForEachItem(shared, [&](const WideItem& item) {
    ForEachStep(p, item, steps, [&](uint32_t number, int head, int tile) {
      const int64_t place = int64_t{item.row_tiles + tile} * p.num_heads + head;
      int* turns = p.turns + place;
#pragma unroll 1
      for (int part = 0; part < S::kSumParts; ++part) {
        attention::WaitBarrier(shared.sums_full(), (number * S::kSumParts + part) % 2);
        if (p.deterministic && part == 0) {
          WaitTurn(turns, TurnOf<S::kKeyTile>(p, item, tile * kRowTile), last);
        }
        StartAdding(p.sums + place * S::kSums + part * (S::kSumBytes / 4), shared.sums(),
                    S::kSumBytes);
        if (p.deterministic && part == 0) {  // the last step's additions are complete, or soon are
          WaitAdded<1>();
          last.Pass();
        }
        WaitAddingRead();
        attention::Arrive(shared.sums_empty());
      }
      if (p.deterministic) last.turns = turns;
    });
  });
  WaitAdded<0>();
  last.Pass();
}

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention_backward

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_WIDE_SHARED_CUH_
