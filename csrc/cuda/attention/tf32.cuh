// Products of float32 on tensor cores, which take TF32, i.e. 11 bits of a number. So a number is
// split into two, and a product is the sum of three: the fourth, of what is left of both, is about
// as small as what float32 rounds away. Tensor cores cut off what CUDA cores would round. So the
// small products have sums of their own, and long sums are added up by CUDA cores, part by part.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_TF32_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_TF32_CUH_

#include <cstdint>

namespace flashxla::attention {

// x = high + low. Tensor cores use 11 bits of both.
template <int kCount>
struct SplitFloats {
  uint32_t high[kCount], low[kCount];

  __device__ void Set(int i, float x) {
    high[i] = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    low[i] = __float_as_uint(x - __uint_as_float(high[i]));
  }
};

// c[16 x 8] += a[16 x 8] b[8 x 8] of TF32.
__device__ inline void MultiplyTf32(float (&c)[4], const uint32_t* a, const uint32_t* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_TF32_CUH_
