// wide's converting warps: what TMA loads from an fp8 cache becomes what the products take.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_FP8_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_FP8_CUH_

#include "cuda/attention/dtypes.cuh"
#include "cuda/attention/mma.cuh"
#include "cuda/attention/wide_tiles.cuh"

namespace flashxla::attention {

#if defined(FLASHXLA_HOPPER)

// Weights of e4m3 and float16 are this power of two times as large, so that fewer of them fall
// below the dtype's smallest number. The largest weight is 1, and e4m3 ends at 448.
constexpr int kLiftLog2 = 8;

// Four weights as e4m3.
__device__ inline uint32_t PackFp8(float x0, float x1, float x2, float x3) {
  uint32_t packed;
  asm("{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; "
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; mov.b32 %0, {low, high};}"
      : "=r"(packed)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return packed;
}

// This warp's share of a kv tile of keys or values, from `from` to `to`.
//
// A step widens 64 columns of 8 keys, of which a lane has 16. Lanes that access shared memory at
// the same time have keys k and k + 4, so that no two of them meet in a bank: what TMA's swizzle
// exchanges differs, and they store the halves of what they have in different order.
template <typename T, bool kE5m2, typename S>
__device__ inline void WidenTile(uint32_t from, uint32_t to) {
  const int lane = threadIdx.x & 31, vector = lane % 4, late = lane / 4 % 2;
  const int key = lane / 8 + late * 4;
  from += key * kWideRowBytes + (vector ^ key) * 16;
  to += key * kWideRowBytes + (vector * 2 + late ^ key) * 16;
#pragma unroll 2
  for (int i = threadIdx.x / 32 - 1; i < S::kKeys / 8 * S::kBlocks; i += S::kConvertingWarps) {
    const int block = i % S::kBlocks, first_key = i / S::kBlocks * 8;
    const uint32_t at =
        (from ^ block % 2 * 64) + (block / 2 * S::kKeys + first_key) * kWideRowBytes;
    uint32_t x[4], y[8];
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      WidenTo<T, kE5m2>(late ? x[j ^ 2] : x[j], &y[2 * j], &y[2 * j + 1]);
    }
    const uint32_t row = to + (block * S::kKeys + first_key) * kWideRowBytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) StoreShared16(row ^ half * 16, &y[4 * half]);
  }
}

// A warpgroup's rows of fp8 queries, in place. They are there as they are in memory, in the first
// blocks of columns. barrier: of the warpgroup, which must call it together.
template <typename T, bool kE5m2, typename S>
__device__ void WidenQueries(uint32_t rows, int barrier) {
  constexpr int kVectors = 8 * S::kRawBlocks * 64, kEach = kVectors / kWarpgroupThreads;
  const int thread = threadIdx.x % kWarpgroupThreads;
  uint4 raw[kEach];
  auto at = [&](int block, int row, int vector) {
    return rows + (block * S::kQTileRows + row) * kWideRowBytes + (vector ^ row % 8) * 16;
  };
  const int vector = thread % 8;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int row = (i * kWarpgroupThreads + thread) / 8;
    raw[i] = LoadShared<uint4>(at(row / 64, row % 64, vector));
  }
  SyncNamed(barrier, kWarpgroupThreads);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int row = (i * kWarpgroupThreads + thread) / 8;
    const int block = row / 64 * 2 + vector / 4;
    if (block >= S::kBlocks) continue;
    const uint32_t x[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
    uint32_t y[8];
#pragma unroll
    for (int j = 0; j < 4; ++j) WidenTo<T, kE5m2>(x[j], &y[2 * j], &y[2 * j + 1]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      StoreShared16(at(block, row % 64, vector % 4 * 2 + half), &y[4 * half]);
    }
  }
  FenceProxy();
  SyncNamed(barrier, kWarpgroupThreads);
}

// This warp's share of a kv tile of e4m3 values [keys, dims], turned to [dims, keys]. kMasks: keys
// outside [low, high) become zeros.
//
// The scores leave a thread with keys 2q, 2q + 1, 2q + 8, 2q + 9 of 16 (q = lane % 4), where the
// products expect columns 4q to 4q + 3. So that is the order of the keys in a turned row.
template <typename S, bool kMasks>
__device__ inline void TurnShare(uint32_t from, uint32_t to, int low, int high) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 - 1;
  // A warp has 32 keys of all dims, or all keys of some dims: so the places of its matrices are
  // constants. To work them out took more instructions than all the rest.
  constexpr int kAllKeyBlocks = S::kKeys / 32, kAllDimBlocks = S::kValueDims / 16;
  constexpr bool kByKeys = kAllKeyBlocks == S::kConvertingWarps;
  constexpr int kKeyBlocks = kByKeys ? 1 : kAllKeyBlocks;
  constexpr int kDimBlocks = kByKeys ? kAllDimBlocks : kAllDimBlocks / S::kConvertingWarps;
  static_assert(kByKeys || kAllDimBlocks % S::kConvertingWarps == 0);
  const int first_key = kByKeys ? warp * 32 : 0, first_block = kByKeys ? 0 : warp * kDimBlocks;
  // Matrix m of the store: even dims for even m, the keys' second half from 2 on.
  const int dim = lane % 8 * 2 + lane / 8 % 2;
  to += (first_block * 16 + dim) * kWideRowBytes + (lane / 16 ^ dim % 8 ^ first_key / 16) * 16;
  from += (first_key + lane) * kWideRowBytes;
#pragma unroll
  for (int d = 0; d < kDimBlocks; ++d) {
    const int block = first_block + d;
    const uint32_t from_dims =
        from + block / 8 * S::kKeys * kWideRowBytes + (block % 8 ^ lane % 8) * 16;
#pragma unroll
    for (int k = 0; k < kKeyBlocks; ++k) {
      uint32_t x[4], y[4];
      LoadMatricesTransposed(x, from_dims + k * 32 * kWideRowBytes);
      // x[m]: dims 2g and 2g + 1 (g = lane / 4) of keys 8m + 2q and 8m + 2q + 1.
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        y[2 * half] = __byte_perm(x[2 * half], x[2 * half + 1], 0x6420);
        y[2 * half + 1] = __byte_perm(x[2 * half], x[2 * half + 1], 0x7531);
        if constexpr (kMasks) {
          uint32_t mask = 0;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int key = first_key + k * 32 + half * 16 + j / 2 * 8 + lane % 4 * 2 + j % 2;
            if (key >= low && key < high) mask |= 0xffu << 8 * j;
          }
          y[2 * half] &= mask, y[2 * half + 1] &= mask;
        }
      }
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                       (to ^ k * 32) + d * 16 * kWideRowBytes),
                   "r"(y[0]), "r"(y[1]), "r"(y[2]), "r"(y[3])
                   : "memory");
    }
  }
}

template <typename S>
__device__ inline void TurnTile(uint32_t from, uint32_t to, int low, int high) {
  low > 0 || high < S::kKeys ? TurnShare<S, true>(from, to, low, high)
                             : TurnShare<S, false>(from, to, low, high);
}

// The converting warps.
template <typename T, typename S, bool kE5m2>
__device__ void ConvertKeys(const WideProblem& w, const WideShared<S>& shared) {
  PipelineState<S::kStages> keys;
  PipelineState<S::kValueStages> values;
  PipelineState<S::kRawStages> raw;
  auto finish = [&](uint32_t full) {
    ReleaseStores(full), Release(shared.raw_empty(raw.stage));
    raw.Next();
  };
  WideTiles<S> tiles(shared);
  for (ManyTile tile; tiles.Next(&tile); tiles.Done()) {
    const int first = tile.begin / S::kKeys;
    for (int n = (tile.end + S::kKeys - 1) / S::kKeys - 1; n >= first; --n) {
      if constexpr (!S::kFp8) {
        WaitBarrier(shared.raw_full(raw.stage), raw.parity);
        WaitBarrier(shared.keys_empty(keys.stage), keys.parity ^ 1);
        WidenTile<T, kE5m2, S>(shared.raw(raw.stage), shared.keys(keys.stage));
        finish(shared.keys_full(keys.stage));
        keys.Next();
      }
      WaitBarrier(shared.raw_full(raw.stage), raw.parity);
      WaitBarrier(shared.values_empty(values.stage), values.parity ^ 1);
      if constexpr (S::kFp8) {
        TurnTile<S>(shared.raw(raw.stage), shared.values(values.stage),
                    tile.s.first_key - n * S::kKeys, tile.s.num_keys - n * S::kKeys);
      } else {
        WidenTile<__half, kE5m2, S>(shared.raw(raw.stage), shared.values(values.stage));
      }
      finish(shared.values_full(values.stage));
      values.Next();
    }
  }
}

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_FP8_CUH_
