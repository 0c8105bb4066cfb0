// What wide's warps share, and its producer warps: the q tiles of a thread block, the stages in
// shared memory, and the TMA loads that fill them.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_LOAD_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_LOAD_CUH_

#include "cuda/attention/hopper.cuh"
#include "cuda/attention/mma.cuh"
#include "cuda/attention/problem.cuh"

namespace flashxla::attention {

// In shared memory queries, keys and values lie in blocks of 64 columns, i.e. rows of 128 bytes.
constexpr int kWideBlockColumns = 64;
constexpr int kWideRowBytes = 128;

constexpr int WideKvTileKeys(int head_size) { return head_size > 128 ? 64 : 128; }

template <int kDims>
struct WideShape {
  static constexpr int kKeys = WideKvTileKeys(kDims);
  static constexpr int kStages = kDims > 128 ? 2 : kDims > 64 ? 3 : 4;
  static constexpr int kQueryStages = 1;
  // Keeps queries in registers, so that matrix instructions do not read them from shared memory
  // each time.
  static constexpr bool kQueriesInRegisters = kDims <= 128;
  static constexpr int kQueryBytes = kManyQTileTokens * kDims * 2;
  static constexpr int kStageBytes = kKeys * kDims * 2;  // of keys; the same of values
  static constexpr int kBarrierBytes = 8 * (2 * kQueryStages + 4 * kStages);
  // Aligning the stages may take up to 1 KB.
  static constexpr int kBytes =
      1024 + kQueryStages * kQueryBytes + 2 * kStages * kStageBytes + kBarrierBytes;
};

struct WideProblem {
  CUtensorMap q, k, v;
  Problem p;
  int box_keys;  // keys per TMA box, which lies in one page
};

// The tile scheduler: the q tiles of a thread block, one per round. The list of q tiles starts with
// the most expensive ones, and every other round goes over the blocks backwards, so that all blocks
// get similar shares. The next round's tile is fetched ahead.
struct WideTile {
  int index, head, first_query, begin, end;
  PlannedSequence s;

  __device__ explicit WideTile(const Problem& p) {
    total_ = p.plan.totals[kMany] * p.num_heads;
    next_tile_ = TileOf(p, 0);
    next_ = p.plan.sequences[next_tile_.x];
    after_ = TileOf(p, 1);
  }

  // Moves to the next tile; false if there are no more.
  __device__ bool Next(const Problem& p) {
    const int item = ItemOf(round_);
    if (item >= total_) return false;
    index = next_tile_.x, head = item % p.num_heads;
    first_query = next_tile_.y * kManyQTileTokens;
    s = next_;
    next_tile_ = after_;
    next_ = p.plan.sequences[next_tile_.x];
    after_ = TileOf(p, ++round_ + 1);
    // Two calls, since a single one takes more registers.
    begin = p.Visible(s, first_query).begin;
    end = p.Visible(s, min(first_query + kManyQTileTokens, s.num_queries) - 1).end;
    return true;
  }

 private:
  int round_ = 0, total_;
  int2 next_tile_, after_;  // sequence and q tile of rounds round_ and round_ + 1
  PlannedSequence next_;

  __device__ int ItemOf(int round) const {
    const int blocks = gridDim.x;
    const int place = round % 2 ? blocks - 1 - static_cast<int>(blockIdx.x) : blockIdx.x;
    return round * blocks + place;
  }
  __device__ int2 TileOf(const Problem& p, int round) const {
    const int item = ItemOf(round);
    return item < total_ ? p.plan.many_tiles[item / p.num_heads] : make_int2(0, 0);
  }
};

#if defined(FLASHXLA_HOPPER)

// Addresses in shared memory: stages of queries, of keys and of values. Each stage has two
// barriers, one for "it is full" and one for "it is empty".
template <int kDims>
struct WideShared {
  using S = WideShape<kDims>;
  uint32_t base, barriers;

  __device__ explicit WideShared(const char* shared) {
    base = (SharedAddress(shared) + 1023) / 1024 * 1024;
    barriers = values(S::kStages);
  }
  __device__ uint32_t queries(int stage) const { return base + stage * S::kQueryBytes; }
  __device__ uint32_t keys(int stage) const {
    return queries(S::kQueryStages) + stage * S::kStageBytes;
  }
  __device__ uint32_t values(int stage) const { return keys(S::kStages + stage); }
  __device__ uint32_t keys_full(int i) const { return barriers + 8 * i; }
  __device__ uint32_t values_full(int i) const { return keys_full(S::kStages + i); }
  __device__ uint32_t keys_empty(int i) const { return keys_full(2 * S::kStages + i); }
  __device__ uint32_t values_empty(int i) const { return keys_full(3 * S::kStages + i); }
  __device__ uint32_t queries_full(int i) const { return keys_full(4 * S::kStages + i); }
  __device__ uint32_t queries_empty(int i) const { return queries_full(S::kQueryStages + i); }
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

// One warp loads the queries, one the keys and one the values, since starting a copy takes time.
template <int kDims>
__device__ void LoadQueries(const WideProblem& w, const WideShared<kDims>& shared) {
  using S = WideShape<kDims>;
  PipelineState<S::kQueryStages> state;
  WideTile tile(w.p);
  while (tile.Next(w.p)) {
    const uint32_t full = shared.queries_full(state.stage);
    WaitBarrier(shared.queries_empty(state.stage), state.parity ^ 1);
    if (threadIdx.x % 32 == 0) {
      ArriveExpecting(full, S::kQueryBytes);
      for (int c = 0; c < kDims / kWideBlockColumns; ++c) {
        LoadBox3(shared.queries(state.stage) + c * kManyQTileTokens * kWideRowBytes, &w.q, full,
                 c * kWideBlockColumns, tile.head, tile.s.first_query + tile.first_query);
      }
    }
    __syncwarp();
    state.Next();
  }
}

template <int kDims, bool kValues>
__device__ void LoadKeys(const WideProblem& w, const WideShared<kDims>& shared) {
  using S = WideShape<kDims>;
  const Problem& p = w.p;
  const int lane = threadIdx.x & 31;
  const int boxes = S::kKeys / w.box_keys;
  const CUtensorMap* map = kValues ? &w.v : &w.k;
  PipelineState<S::kStages> state;
  WideTile tile(p);
  while (tile.Next(p)) {
    const int kv_head = tile.head / p.group_size;
    // The block and token of this lane's box in kv tile n. For keys that do not exist it is a box
    // outside the cache, which TMA fills with zeros.
    auto locate = [&](int n) {
      const int key = n * S::kKeys + lane * w.box_keys;
      if (p.block_table.data == nullptr) return make_int2(0, tile.s.key_row + key);
      int2 place = make_int2(p.block_table.num_blocks, 0);
      if (lane < boxes && key >= 0 && key < tile.s.num_keys) {
        p.Locate(tile.s, tile.index, key, &place.x, &place.y);
      }
      return place;
    };
    const int first = tile.begin / S::kKeys;
    int n = (tile.end + S::kKeys - 1) / S::kKeys - 1;
    int2 place = locate(n);
    for (; n >= first; --n) {
      const int2 next = locate(n - 1);  // early, to hide the latency of the block table
      const uint32_t to = kValues ? shared.values(state.stage) : shared.keys(state.stage);
      const uint32_t full =
          kValues ? shared.values_full(state.stage) : shared.keys_full(state.stage);
      WaitBarrier(kValues ? shared.values_empty(state.stage) : shared.keys_empty(state.stage),
                  state.parity ^ 1);
      if (lane == 0) ArriveExpecting(full, S::kStageBytes);
      __syncwarp();
      if (lane < boxes) {
#pragma unroll
        for (int c = 0; c < kDims / kWideBlockColumns; ++c) {
          LoadBox4(to + c * S::kKeys * kWideRowBytes + lane * w.box_keys * kWideRowBytes, map, full,
                   c * kWideBlockColumns, kv_head, place.y, place.x);
        }
      }
      state.Next();
      place = next;
    }
  }
}

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_LOAD_CUH_
