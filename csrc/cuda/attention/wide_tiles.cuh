// The q tiles of a thread block of wide, one per round: a warp hands them to all.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_TILES_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_TILES_CUH_

#include <cstddef>

#include "cuda/attention/wide_shared.cuh"

namespace flashxla::attention {

constexpr int kTileWords = sizeof(ManyTile) / 4;

#if defined(FLASHXLA_HOPPER)

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
  // The present tile, and its rule. To read them anew takes fewer registers than to keep them.
  __device__ ManyTile Read() const { return ReadTogether(shared_.tile(state_.stage)); }
  __device__ TileRule ReadRule() const { return ReadTogether(shared_.rule(state_.stage)); }
  __device__ TileRule* rule() const { return shared_.rule(state_.stage); }

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

  __device__ void HandOut(const WideProblem& w) {
    const Problem& p = w.p;
    const int lane = threadIdx.x & 31;
    const int item = ItemOfRound(round_, blockIdx.x, gridDim.x);
    WaitBarrier(shared_.tile_empty(state_.stage), state_.parity ^ 1);
    if (!p.makes_plan) {
      int word = -1;
      if (lane < kTileWords && item < items_) {
        const int entry = w.num_heads.Quotient(item);
        const int head = (item - entry * w.work.num_heads) * TileRows<S>{w}.heads();
        word = reinterpret_cast<const int*>(&p.plan.many_tiles[entry])[lane];
        if (lane == offsetof(ManyTile, head) / 4) word = head;
        if (lane == offsetof(ManyTile, kv_head) / 4) word = p.by_group_size.Quotient(head);
      }
      if (lane < kTileWords) reinterpret_cast<int*>(shared_.tile(state_.stage))[lane] = word;
    } else if (round_ > 0 && lane == 0) {  // the first one is there
      *shared_.tile(state_.stage) = TileOfOwn(w, item);
    }
    Release(shared_.tile_full(state_.stage));
    state_.Next(), ++round_;
  }

 private:
  // The block's q tile in an own plan. What it is made from is read anew: shared memory lacks room.
  __device__ ManyTile TileOfOwn(const WideProblem& w, int item) const {
    const Problem& p = w.p;
    ManyTile tile = {};
    tile.index = -1;
    if (item >= items_) return tile;
    const OwnTile own = shared_.own_tiles()[round_];
    Sequence s;
    ReadKeys(p.index, own.index, &s);
    s.first_query = At(p.index.cu_seqlens_q, own.index);
    s.num_queries = At(p.index.cu_seqlens_q, own.index + 1) - s.first_query;
    return own.template Tile<S>(s, p.window, TileRows<S>{w}.tokens());
  }

  const WideShared<S>& shared_;
  PipelineState<S::kTileStages> state_;
  int round_ = 0, items_;
};

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_TILES_CUH_
