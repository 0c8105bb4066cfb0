// swap's producer warps where TMA cannot load the keys, or takes longer: they copy them row by row.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_COPIED_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_COPIED_CUH_

#include <type_traits>

#include "cuda/attention/copied_rows.cuh"
#include "cuda/attention/key_loader.cuh"
#include "cuda/attention/swap_shared.cuh"

namespace flashxla::attention {

#if defined(FLASHXLA_HOPPER)

// Fills the stages, as SwapProduce does. Each warp has 16 keys of a step. kUnit: bytes that are
// copied at a time.
template <int kUnit, typename S>
__device__ void SwapCopy(const SwapProblem& w, const SwapShared<S>& shared,
                         const SequenceList& sequences, const FewBlock& block, int kv_head,
                         int warp) {
  constexpr int kKeys = kFewKvTileKeys / S::kProducerWarps;
  static_assert(kKeys == kSliceKeys);
  constexpr int kBlocks = S::kStreams ? 1 : S::kBlocks;  // of columns that are copied together
  using Rows = CopiedRows<kFewKvTileKeys, kKeys, kBlocks * S::kRowBytes / 16, S::kFp8 ? 16 : 8>;
  const Problem& p = w.p;
  const int lane = threadIdx.x & 31, first_row = warp * kKeys;
  Cursor at(p, sequences, block);
  auto find = [&] { return KeyPlaces::Find(p, at.sequence, at.index, at.first_key() + first_row); };
  KeyPlaces next = find();
  int stage = 0, step = 0;
  uint32_t parity = 1;
  auto advance = [&] {
    if (++stage == S::kStages) stage = 0, parity ^= 1;
  };
  auto copy_blocks = [&](Cache columns, int2 place, int blocks) {
#pragma unroll 1
    for (int i = 0; i < blocks; ++i) {
      WaitBarrier(shared.empty(stage), parity);
      Rows::template Copy<kUnit>(columns, kv_head, place, first_row, shared.stage(stage));
      ArriveAfterCopies(shared.keys_full(stage));
      if (lane == 0) Arrive(shared.keys_full(stage));
      __syncwarp();
      advance();
      columns.data += S::kRowBytes, columns.head_size -= S::kBlockDims;
    }
  };
#pragma unroll 1
  while (at.step < at.end) {
    KeyPlaces places = next;
    places.Resolve(p);
    const bool exists = places.mask >> lane % kKeys & 1;
    const int2 place = make_int2(exists ? places.block : -1, places.token);
    at.Next(p);
    if (at.step < at.end) next = find();  // early, to hide the block table's latency
    if constexpr (S::kStreams) {
      if (lane == 0) shared.mask(step, warp) = static_cast<uint16_t>(places.mask);
      if (++step == S::kStages) step = 0;
      copy_blocks(p.k, place, S::KeyBlocks(p));
      copy_blocks(p.v, place, S::kValueBlocks);
    } else {
      WaitBarrier(shared.empty(stage), parity);
      Rows::template Copy<kUnit>(p.k, kv_head, place, first_row, shared.stage(stage));
      ArriveAfterCopies(shared.keys_full(stage));
      if (lane == 0) {
        shared.mask(stage, warp) = static_cast<uint16_t>(places.mask);
        Arrive(shared.keys_full(stage));
      }
      __syncwarp();
      Rows::template Copy<kUnit>(p.v, kv_head, place, first_row,
                                 shared.stage(stage) + S::kHalfBytes);
      ArriveAfterCopies(shared.values_full(stage));
      advance();
    }
  }
  WaitCopies<0>();
}

template <typename S>
__device__ void SwapCopy(const SwapProblem& w, const SwapShared<S>& shared,
                         const SequenceList& sequences, const FewBlock& block, int kv_head,
                         int warp) {
  auto copy = [&](auto unit) {
    SwapCopy<decltype(unit)::value>(w, shared, sequences, block, kv_head, warp);
  };
  if (w.p.kv_unit == 16) return copy(std::integral_constant<int, 16>{});
  if (w.p.kv_unit == 8) return copy(std::integral_constant<int, 8>{});
  copy(std::integral_constant<int, 4>{});
}

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_COPIED_CUH_
