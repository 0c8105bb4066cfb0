// Warp-wide matrix instructions (sm_80 and newer) and the loads that feed them.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_MMA_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_MMA_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flashxla::attention {

__device__ inline uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copies 16 bytes from global to shared memory asynchronously. If !valid, writes zeros and reads
// nothing.
__device__ inline void CopyAsync16(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}
// The same of 4, 8 or 16 bytes, kBehind bytes after both addresses.
template <int kBytes, int kBehind = 0>
__device__ inline void CopyAsync(uint32_t to, const void* from, bool valid) {
  if constexpr (kBytes == 16 && kBehind == 0) return CopyAsync16(to, from, valid);
  asm volatile("cp.async.ca.shared.global [%0 + %4], [%1 + %4], %3, %2;" ::"r"(to), "l"(from),
               "r"(valid ? kBytes : 0), "n"(kBytes), "n"(kBehind)
               : "memory");
}
__device__ inline void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ inline void WaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Stores 16 bytes in shared memory.
__device__ inline void StoreShared16(uint32_t address, const uint32_t* words) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// The same in global memory: ptxas splits other stores of vectors where they have a condition.
__device__ inline void StoreGlobal16(void* address, const uint32_t* words) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// What lies in shared memory as 4, 8 or a multiple of 16 bytes, aligned to as many, at most 16.
template <typename T>
__device__ inline T LoadShared(uint32_t address) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) % 16 == 0);
  T x;
  auto* words = reinterpret_cast<uint32_t*>(&x);
  if constexpr (sizeof(T) == 4) {
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(words[0]) : "r"(address) : "memory");
  } else if constexpr (sizeof(T) == 8) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1])
                 : "r"(address)
                 : "memory");
  } else {
#pragma unroll
    for (size_t i = 0; i < sizeof(T) / 16; ++i, words += 4) {
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                   : "r"(address + static_cast<int>(i) * 16)
                   : "memory");
    }
  }
  return x;
}

__device__ inline void LoadMatrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ inline void LoadMatricesTransposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// c[16 x 8] += a[16 x 16] b[16 x 8].
template <typename T>
__device__ void Multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ inline void Multiply<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void Multiply<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <typename T>
__device__ uint32_t Pack(float x, float y);
template <>
__device__ inline uint32_t Pack<__nv_bfloat16>(float x, float y) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  return reinterpret_cast<const uint32_t&>(pair);
}
template <>
__device__ inline uint32_t Pack<__half>(float x, float y) {
  const __half2 pair = __floats2half2_rn(x, y);
  return reinterpret_cast<const uint32_t&>(pair);
}

// 2^x, 0 for -inf; accurate to 2 ulp, far below what 16-bit probabilities keep.
__device__ inline float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh(x) = 1 - 2 / (1 + e^2x) from 2 x log2(e), without a branch, to 1e-7.
__device__ inline float TanhFromLog2(float x) { return 1.f - __fdividef(2.f, 1.f + Exp2(x)); }

// The same of four numbers, with one reciprocal in place of four: 1 / a = b c d / (a b c d). A NaN
// makes all of them NaN. Above 2^30 the result is 1, so nothing overflows.
__device__ inline void TanhFromLog2(float& x0, float& x1, float& x2, float& x3) {
  float* const x[4] = {&x0, &x1, &x2, &x3};
  float d[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float e = Exp2(*x[i]);
    asm("min.NaN.f32 %0, %0, 0f4e800000;" : "+f"(e));
    d[i] = 1.f + e;
  }
  const float d01 = d[0] * d[1], d23 = d[2] * d[3];
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(d01 * d23));
  inverse *= -2.f;
  const float of01 = inverse * d23, of23 = inverse * d01;
  x0 = fmaf(of01, d[1], 1.f), x1 = fmaf(of01, d[0], 1.f);
  x2 = fmaf(of23, d[3], 1.f), x3 = fmaf(of23, d[2], 1.f);
}

// The largest power of two that is not above x >= 0, clamped so that it has an inverse.
__device__ inline float PowerOfTwoBelow(float x) {
  return __uint_as_float(min(max(__float_as_uint(x) & 0x7f800000u, 0x01000000u), 0x7e000000u));
}

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_MMA_CUH_
