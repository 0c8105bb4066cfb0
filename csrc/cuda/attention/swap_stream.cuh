// A step of swap with head sizes above 256. Its keys and values come block by block of columns:
// each block has a stage, which is given back as soon as the block has been used.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_STREAM_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_STREAM_CUH_

#include "cuda/attention/swap_tile.cuh"

namespace flashxla::attention {

#if defined(FLASHXLA_HOPPER)

template <typename S, int kRows>
__device__ void SwapTile<S, kRows>::Stream(const Problem& p, int mask_index, int first,
                                           bool is_first, int& stage, uint32_t& parity) {
  const uint64_t weights = MatrixDescriptor(shared.weights(group), 0);
  const uint64_t queries = MatrixDescriptor(shared.queries(group), 0);
  // Calls use(address) with the next block, which is given back then.
  auto take = [&](auto&& use) {
    WaitBarrier(shared.keys_full(stage), parity);
    use(shared.stage(stage));
    Release(shared.empty(stage));
    if (++stage == S::kStages) stage = 0, parity ^= 1;
  };
  float score[kRows / 2];
  const int blocks = S::KeyBlocks(p);
  constexpr int kTiles = S::kBlockDims / 64, kSteps = S::kBlockDims / 16;  // of a block
  constexpr int kQueryBlockBytes = kTiles * kRows * S::kRowBytes;
  if constexpr (S::kFp8) {
    const bool e5m2 = p.kv_dtype == FLASHXLA_F8E5M2;
    // The next block is widened while the products with this one are computed.
    uint32_t now[kSteps][4], next[kSteps][4];
    auto widen = [&](uint32_t keys) {
      e5m2 ? WidenKeys<true, S::kBlockDims>(keys, warp, next)
           : WidenKeys<false, S::kBlockDims>(keys, warp, next);
    };
    take(widen);
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) now[k][i] = next[k][i];
      }
      const uint64_t of_block = After(queries, block * kQueryBlockBytes);
      FenceMatrix();
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        MatrixProduct<__half, kRows>::Start(score, now[k], After(of_block, QueryOffset(k)),
                                            block > 0 || k > 0);
      }
      CommitMatrix();
      if (block + 1 < blocks) take(widen);
      WaitMatrix<0>();
      Pin(score);
    }
  } else {
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      take([&](uint32_t keys) {
        FenceProxy();  // other threads' copies
        const uint64_t of_block = After(queries, block * kQueryBlockBytes);
        const uint64_t descriptor = MatrixDescriptor(keys, 0);
        FenceMatrix();
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          MatrixProduct<T, kRows>::template Start<false, false>(score, After(descriptor, k * 32),
                                                                After(of_block, QueryOffset(k)),
                                                                block > 0 || k > 0);
        }
        CommitMatrix();
        WaitMatrix<0>();
        Pin(score);
      });
    }
  }
  Weigh(p, score, first, is_first, shared.mask(mask_index));
  StoreWeights(score);
  FenceProxy();
  SyncGroup();
  if constexpr (S::kFp8) {
    const bool e5m2 = p.kv_dtype == FLASHXLA_F8E5M2;
    uint32_t wide[2][kTiles][4][4];
    auto widen = [&](auto& to) {
      take([&](uint32_t values) {
        e5m2 ? WidenValues<true, S::kBlockDims>(values, warp, to)
             : WidenValues<false, S::kBlockDims>(values, warp, to);
      });
    };
    widen(wide[0]);
#pragma unroll
    for (int block = 0; block < S::kValueBlocks; ++block) {
      FenceMatrix();
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          MatrixProduct<__half, kRows>::Start(out[block * kTiles + tile], wide[block % 2][tile][k],
                                              After(weights, k * 32), true);
        }
      }
      CommitMatrix();
      if (block + 1 < S::kValueBlocks) widen(wide[(block + 1) % 2]);
      WaitMatrix<0>();
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) Pin(out[block * kTiles + tile]);
    }
  } else {
#pragma unroll
    for (int block = 0; block < S::kValueBlocks; ++block) {
      take([&](uint32_t values) {
        FenceProxy();  // other threads' copies
        const uint64_t descriptor = MatrixDescriptor(values, 0);
        FenceMatrix();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          MatrixProduct<T, kRows>::template Start<true, false>(
              out[block], After(descriptor, k * 16 * S::kRowBytes), After(weights, k * 32), true);
        }
        CommitMatrix();
        WaitMatrix<0>();
        Pin(out[block]);
      });
    }
  }
}

// Row by row: code for all rows at once would take longer to arrive than it saves.
template <typename S, int kRows>
__device__ void SwapTile<S, kRows>::LoadQueryRows(const SwapProblem& w, const Cursor& at,
                                                  int kv_head, int num_rows) const {
  constexpr int kChunks = S::kQueryDims / 8, kEach = (kChunks + 31) / 32;
  const Problem& p = w.p;
  const uint32_t queries = shared.queries(group);
#pragma unroll 1
  for (int row = warp; row < kRows; row += kSwapGroupWarps) {
    uint32_t x[kEach][4] = {};
    if (row < num_rows) {
      const RowPlace place = PlaceOf(p, at, kv_head, row);
      const int64_t offset = place.token * p.q.stride_token + place.head * p.q.stride_head;
#pragma unroll
      for (int n = 0; n < kEach; ++n) {
        const int d = (n * 32 + lane) * 8;
        if (d < p.k.head_size) LoadEight(w, offset, d, x[n]);
      }
    }
    float power = 1.f;
    if constexpr (!std::is_same_v<T, typename S::Out>) {
      float largest = 0.f;
#pragma unroll
      for (int n = 0; n < kEach; ++n) largest = fmaxf(largest, LargestOf(x[n]));
      power = PowerOfTwoBelow(MaxOfWarp(largest));  // NaN and infinity stay what they are
#pragma unroll
      for (int n = 0; n < kEach; ++n) DivideQueries(x[n], power);
    }
    if (lane == 0) rows.power[row] = power;
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      const int d = (n * 32 + lane) * 8;
      if (d >= S::kQueryDims) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        StoreShared4(queries + d / 64 * kRows * S::kRowBytes + SwapQueryOffset(row, d + 2 * i),
                     x[n][i]);
      }
    }
  }
}

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_STREAM_CUH_
