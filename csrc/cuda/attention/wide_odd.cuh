// What wide does of its own for odd heads, which do not all begin and end at multiples of 16 bytes,
// as heads of 100 do. TMA reads nothing that begins elsewhere, so threads copy keys
// (wide_gather.cuh, wide_gather_fp8.cuh) and queries.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_ODD_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_ODD_CUH_

#include <type_traits>

#include "cuda/attention/mma.cuh"
#include "cuda/attention/wide_fp8.cuh"
#include "cuda/attention/wide_shared.cuh"

namespace flashxla::attention {

#if defined(FLASHXLA_HOPPER)

// Starts to copy a warpgroup's rows of a q tile to `queries`, those of all warpgroups; rows and
// columns that do not exist become 0. All its threads must call it. kBytes: of a row in shared
// memory; kUnit: of a copy.
template <int kBytes, int kUnit, typename S>
__device__ void CopyOddQueries(const Problem& p, const TileRows<S>& of, const ManyTile& tile,
                               int group, uint32_t queries) {
  constexpr int kUnits = kBytes / kUnit, kEach = 64 * kUnits / kWarpgroupThreads;
  const int size = p.q_dtype == p.out_dtype ? 2 : 1;
#pragma unroll 4
  for (int n = 0; n < kEach; ++n) {
    const int i = n * kWarpgroupThreads + threadIdx.x % kWarpgroupThreads;
    const int row = group * 64 + i / kUnits, at = i % kUnits * kUnit, chunk = at / 16;
    const int offset = of.Query(row), query = tile.first_query + offset;
    const int64_t head = tile.head + row - offset * of.heads();
    CopyAsync<kUnit>(
        queries + (chunk / 8 * S::kQTileRows + row) * kWideRowBytes + (chunk % 8 ^ row % 8) * 16 +
            at % 16,
        p.q.data +
            ((tile.s.first_query + query) * p.q.stride_token + head * p.q.stride_head) * size + at,
        query < tile.s.num_queries && offset < of.tokens() && at < p.k.head_size * size);
  }
}

// The same, and waits for them; fp8 queries of 16-bit products are widened to Out. barrier: of the
// warpgroup.
template <int kDims, typename Out, typename S>
__device__ void LoadOddQueries(const Problem& p, const TileRows<S>& of, const ManyTile& tile,
                               int group, uint32_t queries, int barrier) {
  const bool fp8 = !S::kDirect && p.q_dtype != p.out_dtype;
  auto copy = [&](auto bytes) {
    constexpr int kBytes = decltype(bytes)::value;
    p.q_unit >= 8 ? CopyOddQueries<kBytes, 8>(p, of, tile, group, queries)
                  : CopyOddQueries<kBytes, 4>(p, of, tile, group, queries);
  };
  SyncNamed(barrier, kWarpgroupThreads);  // the products of the last tile are over
  if (fp8) {
    copy(std::integral_constant<int, kDims>{});
  } else {
    copy(std::integral_constant<int, 2 * kDims>{});
  }
  CommitCopies();
  WaitCopies<0>();
  FenceProxy();
  SyncNamed(barrier, kWarpgroupThreads);
  if constexpr (!S::kDirect) {
    const uint32_t mine = queries + group * 64 * kWideRowBytes;
    if (!fp8) return;
    p.q_dtype == FLASHXLA_F8E5M2 ? WidenQueries<Out, true, S>(mine, barrier)
                                 : WidenQueries<Out, false, S>(mine, barrier);
  }
}

// Writes dims [d, d + 8) of a row of results, as far as they exist.
template <typename T>
__device__ inline void StoreOddOutput(const WideProblem& w, T* row, int d, const uint32_t (&x)[4]) {
  const int columns = w.p.v.head_size - d;
  auto* const to = reinterpret_cast<uint32_t*>(row + d);
  if (w.p.out_unit >= 8) {
    *reinterpret_cast<uint2*>(to) = make_uint2(x[0], x[1]);
    if (columns > 4) *reinterpret_cast<uint2*>(to + 2) = make_uint2(x[2], x[3]);
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (columns > 2 * j) to[j] = x[j];
  }
}

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_ODD_CUH_
