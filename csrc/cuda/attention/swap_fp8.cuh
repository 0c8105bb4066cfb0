// fp8 keys and values as the first operand of Hopper's matrix instructions: widened to f16 on their
// way from shared memory into registers.
//
// An instruction takes 16 columns of the operand from a thread: columns 2q, 2q + 1, 2q + 8, 2q + 9
// of rows r and r + 8, with r = lane / 4, q = lane % 4. Which dims and keys these stand for is
// free, if both operands agree. Here each thread reads long runs of memory, without bank conflicts:
// - Keys [64 keys x dims]: row r of a warp's 16 is key SwapKey(r); a thread's 16 columns of 4
//   instructions are 16 neighbouring dims. SwapQueryOffset puts the queries in the same order.
// - Values, turned [dims x 64 keys]: the columns are keys in the order of the rows above; a
// thread's
//   rows of 2 instructions are 4 neighbouring dims (SwapValueDim).
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_FP8_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_FP8_CUH_

#include "cuda/attention/dtypes.cuh"
#include "cuda/attention/swap_shared.cuh"

namespace flashxla::attention {

#if defined(FLASHXLA_HOPPER)

// The key, of 8, of row r: two neighbouring rows are 4 keys apart, and even rows are in different
// pairs of keys, as odd ones are.
__device__ inline int SwapKey(int r) { return ((r & 6) + (r >> 2)) ^ (r & 1) * 4; }

// The byte offset of dims d and d + 1 (d even) of a row in the block of 64 columns d / 64.
__device__ inline int SwapQueryOffset(int row, int d) {
  const int chunk = d % 16 / 4 * 2 + d % 4 / 2;
  return row * 128 + (chunk ^ row % 8) * 16 + d / 16 % 4 * 4;
}

// The dim of row r + 8 * half of a warp's 16 in tile `tile` of 64 rows.
__device__ inline int SwapValueDim(int tile, int warp, int r, int half) {
  return tile / 2 * 128 + warp * 32 + r * 4 + tile % 2 * 2 + half;
}

__device__ inline void StoreShared4(uint32_t address, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

template <bool kE5m2, int kDims>
__device__ inline void WidenKeys(uint32_t keys, int warp, uint32_t (&a)[kDims / 16][4]) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < kDims / 64; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = warp * 16 + half * 8 + SwapKey(lane / 4), chunk = n % 2 * 4 + lane % 4;
      const uint4 x =
          LoadShared<uint4>(keys + (n / 2 * kFewKvTileKeys + key) * 128 + (chunk ^ key % 8) * 16);
      const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        WidenFp8x4<kE5m2>(words[i], &a[4 * n + i][half], &a[4 * n + i][2 + half]);
      }
    }
  }
}

template <bool kE5m2, int kDims>
__device__ inline void WidenValues(uint32_t values, int warp, uint32_t (&a)[kDims / 64][4][4]) {
  const int lane = threadIdx.x & 31, r = lane / 4, q = lane % 4;
#pragma unroll
  for (int n = 0; n < kDims / 128; ++n) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      uint32_t pairs[2][4];  // dims 0 and 1, dims 2 and 3 of four keys
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = k * 16 + i / 2 * 8 + SwapKey(2 * q + i % 2), chunk = warp * 2 + r / 4;
        const uint32_t word = LoadShared<uint32_t>(values + (n * kFewKvTileKeys + key) * 128 +
                                                   (chunk ^ key % 8) * 16 + r % 4 * 4);
        WidenFp8x4<kE5m2>(word, &pairs[0][i], &pairs[1][i]);
      }
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const uint32_t (&x)[4] = pairs[tile];
        uint32_t (&to)[4] = a[2 * n + tile][k];
        to[0] = __byte_perm(x[0], x[1], 0x5410), to[1] = __byte_perm(x[0], x[1], 0x7632);
        to[2] = __byte_perm(x[2], x[3], 0x5410), to[3] = __byte_perm(x[2], x[3], 0x7632);
      }
    }
  }
}

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_SWAP_FP8_CUH_
