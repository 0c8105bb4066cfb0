// Hopper's matrix instructions (wgmma), by the number of columns of their results.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_MATRIX_PRODUCT_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_MATRIX_PRODUCT_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "cuda/attention/hopper.cuh"

#if defined(FLASHXLA_HOPPER)

namespace flashxla::attention {

// Start: c[64 x kColumns] = or += a b^T, with a [64 x k] and b [kColumns x k], where k is 16, and
// 32 of fp8. b is in shared memory, a there or in registers, in rows as of hopper.cuh. kTurnA: a is
// [k x 64] there; kTurnB: b is [k x kColumns].
template <typename T, int kColumns>
struct MatrixProduct;

// Sums by 8 columns, as MatrixProduct takes them.
template <int kCount>
__device__ inline auto Flat(float (&c)[kCount][4]) -> float (&)[kCount * 4] {
  return reinterpret_cast<float (&)[kCount * 4]>(c);
}

#define FLASHXLA_NAMES_4 "%0, %1, %2, %3"
#define FLASHXLA_NAMES_8 FLASHXLA_NAMES_4 ", %4, %5, %6, %7"
#define FLASHXLA_NAMES_16 FLASHXLA_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FLASHXLA_NAMES_32 \
  FLASHXLA_NAMES_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FLASHXLA_NAMES_40 FLASHXLA_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FLASHXLA_NAMES_48 FLASHXLA_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FLASHXLA_NAMES_64 \
  FLASHXLA_NAMES_48       \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FLASHXLA_NAMES_96                                                            \
  FLASHXLA_NAMES_64                                                                  \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FLASHXLA_NAMES_128                           \
  FLASHXLA_NAMES_96                                  \
  ", %96, %97, %98, %99, %100, %101, %102, %103"     \
  ", %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119" \
  ", %120, %121, %122, %123, %124, %125, %126, %127"

#define FLASHXLA_SUMS_4(c, i) "+f"((c)[i]), "+f"((c)[i + 1]), "+f"((c)[i + 2]), "+f"((c)[i + 3])
#define FLASHXLA_SUMS_8(c, i) FLASHXLA_SUMS_4(c, i), FLASHXLA_SUMS_4(c, i + 4)
#define FLASHXLA_SUMS_16(c, i) FLASHXLA_SUMS_8(c, i), FLASHXLA_SUMS_8(c, i + 8)
#define FLASHXLA_SUMS_32(c, i) FLASHXLA_SUMS_16(c, i), FLASHXLA_SUMS_16(c, i + 16)
#define FLASHXLA_SUMS_40(c, i) FLASHXLA_SUMS_32(c, i), FLASHXLA_SUMS_8(c, i + 32)
#define FLASHXLA_SUMS_48(c, i) FLASHXLA_SUMS_32(c, i), FLASHXLA_SUMS_16(c, i + 32)
#define FLASHXLA_SUMS_64(c, i) FLASHXLA_SUMS_32(c, i), FLASHXLA_SUMS_32(c, i + 32)
#define FLASHXLA_SUMS_96(c, i) FLASHXLA_SUMS_64(c, i), FLASHXLA_SUMS_32(c, i + 64)
#define FLASHXLA_SUMS_128(c, i) FLASHXLA_SUMS_64(c, i), FLASHXLA_SUMS_64(c, i + 64)

// n0 to n6: the numbers of the operands after the sums.
#define FLASHXLA_PRODUCT(T, name, columns, sums, n0, n1, n2, n3, n4, n5, n6)                       \
  template <>                                                                                      \
  struct MatrixProduct<T, columns> {                                                               \
    template <bool kTurnA = false, bool kTurnB = false>                                            \
    __device__ static void Start(float (&c)[sums], uint64_t a, uint64_t b, bool add) {             \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #n2                                           \
                   ", 0; wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." name "." name      \
                   " {" FLASHXLA_NAMES_##sums "}, %" #n0 ", %" #n1 ", p, 1, 1, %" #n3 ", %" #n4    \
                                              ";}"                                                 \
                   : FLASHXLA_SUMS_##sums(c, 0)                                                    \
                   : "l"(a), "l"(b), "r"(int{add}), "n"(int{kTurnA}), "n"(int{kTurnB}));           \
    }                                                                                              \
    template <bool kTurnB = false>                                                                 \
    __device__ static void Start(float (&c)[sums], const uint32_t (&a)[4], uint64_t b, bool add) { \
      asm volatile(                                                                                \
          "{.reg .pred p; setp.ne.b32 p, %" #n5 ", 0; wgmma.mma_async.sync.aligned.m64n" #columns  \
          "k16.f32." name "." name " {" FLASHXLA_NAMES_##sums                                      \
          "}, {%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4 ", p, 1, 1, %" #n6 ";}"             \
          : FLASHXLA_SUMS_##sums(c, 0)                                                             \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{add}), "n"(int{kTurnB}));  \
    }                                                                                              \
  };
#define FLASHXLA_PRODUCTS(columns, sums, n0, n1, n2, n3, n4, n5, n6)                 \
  FLASHXLA_PRODUCT(__nv_bfloat16, "bf16", columns, sums, n0, n1, n2, n3, n4, n5, n6) \
  FLASHXLA_PRODUCT(__half, "f16", columns, sums, n0, n1, n2, n3, n4, n5, n6)
FLASHXLA_PRODUCTS(8, 4, 4, 5, 6, 7, 8, 9, 10)
FLASHXLA_PRODUCTS(16, 8, 8, 9, 10, 11, 12, 13, 14)
FLASHXLA_PRODUCTS(32, 16, 16, 17, 18, 19, 20, 21, 22)
FLASHXLA_PRODUCTS(64, 32, 32, 33, 34, 35, 36, 37, 38)
FLASHXLA_PRODUCTS(80, 40, 40, 41, 42, 43, 44, 45, 46)
FLASHXLA_PRODUCTS(96, 48, 48, 49, 50, 51, 52, 53, 54)
FLASHXLA_PRODUCTS(128, 64, 64, 65, 66, 67, 68, 69, 70)
FLASHXLA_PRODUCTS(192, 96, 96, 97, 98, 99, 100, 101, 102)
FLASHXLA_PRODUCTS(256, 128, 128, 129, 130, 131, 132, 133, 134)

#define FLASHXLA_FP8_PRODUCT(columns, sums, n0, n1, n2, n3, n4, n5)                                \
  template <>                                                                                      \
  struct MatrixProduct<__nv_fp8_e4m3, columns> {                                                   \
    __device__ static void Start(float (&c)[sums], uint64_t a, uint64_t b, bool add) {             \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #n2                                           \
                   ", 0; wgmma.mma_async.sync.aligned.m64n" #columns                               \
                   "k32.f32.e4m3.e4m3 {" FLASHXLA_NAMES_##sums "}, %" #n0 ", %" #n1 ", p, 1, 1;}"  \
                   : FLASHXLA_SUMS_##sums(c, 0)                                                    \
                   : "l"(a), "l"(b), "r"(int{add}));                                               \
    }                                                                                              \
    template <bool kTurnB = false>                                                                 \
    __device__ static void Start(float (&c)[sums], const uint32_t (&a)[4], uint64_t b, bool add) { \
      static_assert(!kTurnB);                                                                      \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #n5                                           \
                   ", 0; wgmma.mma_async.sync.aligned.m64n" #columns                               \
                   "k32.f32.e4m3.e4m3 {" FLASHXLA_NAMES_##sums "}, {%" #n0 ", %" #n1 ", %" #n2     \
                                                               ", %" #n3 "}, %" #n4 ", p, 1, 1;}"  \
                   : FLASHXLA_SUMS_##sums(c, 0)                                                    \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{add}));           \
    }                                                                                              \
  };
FLASHXLA_FP8_PRODUCT(64, 32, 32, 33, 34, 35, 36, 37)
FLASHXLA_FP8_PRODUCT(96, 48, 48, 49, 50, 51, 52, 53)
FLASHXLA_FP8_PRODUCT(128, 64, 64, 65, 66, 67, 68, 69)
FLASHXLA_FP8_PRODUCT(192, 96, 96, 97, 98, 99, 100, 101)
FLASHXLA_FP8_PRODUCT(256, 128, 128, 129, 130, 131, 132, 133)

#undef FLASHXLA_NAMES_4
#undef FLASHXLA_SUMS_4
#undef FLASHXLA_NAMES_8
#undef FLASHXLA_SUMS_8
#undef FLASHXLA_NAMES_16
#undef FLASHXLA_SUMS_16
#undef FLASHXLA_NAMES_32
#undef FLASHXLA_SUMS_32
#undef FLASHXLA_NAMES_40
#undef FLASHXLA_SUMS_40
#undef FLASHXLA_NAMES_48
#undef FLASHXLA_SUMS_48
#undef FLASHXLA_NAMES_64
#undef FLASHXLA_SUMS_64
#undef FLASHXLA_NAMES_96
#undef FLASHXLA_SUMS_96
#undef FLASHXLA_NAMES_128
#undef FLASHXLA_SUMS_128
#undef FLASHXLA_PRODUCT
#undef FLASHXLA_PRODUCTS
#undef FLASHXLA_FP8_PRODUCT

}  // namespace flashxla::attention

#endif  // FLASHXLA_HOPPER

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_MATRIX_PRODUCT_CUH_
