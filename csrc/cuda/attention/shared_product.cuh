// Hopper's matrix instructions with few columns, whose operands lie in shared memory, each by rows
// or turned, or the first in registers.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_SHARED_PRODUCT_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_SHARED_PRODUCT_CUH_

#include "cuda/attention/hopper.cuh"

#if defined(FLASHXLA_HOPPER)

namespace flashxla::attention {

// c[64 x kColumns] = or += a b^T, with a [64 x 16] and b [kColumns x 16] in rows as of hopper.cuh.
// kTurnA: a is [16 x 64] there; kTurnB: b is [16 x kColumns].
template <typename T, int kColumns>
struct SharedProduct;

#define FLASHXLA_SHARED_PRODUCT(T, name)                                            \
  template <>                                                                       \
  struct SharedProduct<T, 8> {                                                      \
    template <bool kTurnA, bool kTurnB>                                             \
    __device__ static void Start(float (&c)[4], uint64_t a, uint64_t b, bool add) { \
      asm volatile(                                                                 \
          "{.reg .pred p; setp.ne.b32 p, %6, 0; "                                   \
          "wgmma.mma_async.sync.aligned.m64n8k16.f32." name "." name                \
          " {"                                                                      \
          "%0, %1, %2, %3"                                                          \
          "}, %4, %5, p, 1, 1, %7, %8;}"                                            \
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                          \
          : "l"(a), "l"(b), "r"(int{add}), "n"(int{kTurnA}), "n"(int{kTurnB}));     \
    }                                                                               \
  };
FLASHXLA_SHARED_PRODUCT(__nv_bfloat16, "bf16")
FLASHXLA_SHARED_PRODUCT(__half, "f16")
#undef FLASHXLA_SHARED_PRODUCT

#define FLASHXLA_SHARED_PRODUCT(T, name)                                                        \
  template <>                                                                                   \
  struct SharedProduct<T, 16> {                                                                 \
    template <bool kTurnA, bool kTurnB>                                                         \
    __device__ static void Start(float (&c)[8], uint64_t a, uint64_t b, bool add) {             \
      asm volatile(                                                                             \
          "{.reg .pred p; setp.ne.b32 p, %10, 0; "                                              \
          "wgmma.mma_async.sync.aligned.m64n16k16.f32." name "." name                           \
          " {"                                                                                  \
          "%0, %1, %2, %3, %4, %5, %6, %7"                                                      \
          "}, %8, %9, p, 1, 1, %11, %12;}"                                                      \
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), \
            "+f"(c[7])                                                                          \
          : "l"(a), "l"(b), "r"(int{add}), "n"(int{kTurnA}), "n"(int{kTurnB}));                 \
    }                                                                                           \
  };
FLASHXLA_SHARED_PRODUCT(__nv_bfloat16, "bf16")
FLASHXLA_SHARED_PRODUCT(__half, "f16")
#undef FLASHXLA_SHARED_PRODUCT

#define FLASHXLA_SHARED_PRODUCT(T, name)                                                        \
  template <>                                                                                   \
  struct SharedProduct<T, 32> {                                                                 \
    template <bool kTurnA, bool kTurnB>                                                         \
    __device__ static void Start(float (&c)[16], uint64_t a, uint64_t b, bool add) {            \
      asm volatile(                                                                             \
          "{.reg .pred p; setp.ne.b32 p, %18, 0; "                                              \
          "wgmma.mma_async.sync.aligned.m64n32k16.f32." name "." name                           \
          " {"                                                                                  \
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"                \
          "}, %16, %17, p, 1, 1, %19, %20;}"                                                    \
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), \
            "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]),          \
            "+f"(c[13]), "+f"(c[14]), "+f"(c[15])                                               \
          : "l"(a), "l"(b), "r"(int{add}), "n"(int{kTurnA}), "n"(int{kTurnB}));                 \
    }                                                                                           \
  };
FLASHXLA_SHARED_PRODUCT(__nv_bfloat16, "bf16")
FLASHXLA_SHARED_PRODUCT(__half, "f16")
#undef FLASHXLA_SHARED_PRODUCT

#define FLASHXLA_SHARED_PRODUCT(T, name)                                                        \
  template <>                                                                                   \
  struct SharedProduct<T, 64> {                                                                 \
    template <bool kTurnA, bool kTurnB>                                                         \
    __device__ static void Start(float (&c)[32], uint64_t a, uint64_t b, bool add) {            \
      asm volatile(                                                                             \
          "{.reg .pred p; setp.ne.b32 p, %34, 0; "                                              \
          "wgmma.mma_async.sync.aligned.m64n64k16.f32." name "." name                           \
          " {"                                                                                  \
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "              \
          "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"      \
          "}, %32, %33, p, 1, 1, %35, %36;}"                                                    \
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), \
            "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]),          \
            "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]),       \
            "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]),       \
            "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]),       \
            "+f"(c[31])                                                                         \
          : "l"(a), "l"(b), "r"(int{add}), "n"(int{kTurnA}), "n"(int{kTurnB}));                 \
    }                                                                                           \
  };
FLASHXLA_SHARED_PRODUCT(__nv_bfloat16, "bf16")
FLASHXLA_SHARED_PRODUCT(__half, "f16")
#undef FLASHXLA_SHARED_PRODUCT

#define FLASHXLA_SHARED_PRODUCT(T, name)                                                        \
  template <>                                                                                   \
  struct SharedProduct<T, 128> {                                                                \
    template <bool kTurnA, bool kTurnB>                                                         \
    __device__ static void Start(float (&c)[64], uint64_t a, uint64_t b, bool add) {            \
      asm volatile(                                                                             \
          "{.reg .pred p; setp.ne.b32 p, %66, 0; "                                              \
          "wgmma.mma_async.sync.aligned.m64n128k16.f32." name "." name                          \
          " {"                                                                                  \
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "              \
          "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "    \
          "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "    \
          "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"      \
          "}, %64, %65, p, 1, 1, %67, %68;}"                                                    \
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), \
            "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]),          \
            "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]),       \
            "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]),       \
            "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]),       \
            "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]),       \
            "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]), "+f"(c[42]),       \
            "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]),       \
            "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]),       \
            "+f"(c[55]), "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]),       \
            "+f"(c[61]), "+f"(c[62]), "+f"(c[63])                                               \
          : "l"(a), "l"(b), "r"(int{add}), "n"(int{kTurnA}), "n"(int{kTurnB}));                 \
    }                                                                                           \
  };
FLASHXLA_SHARED_PRODUCT(__nv_bfloat16, "bf16")
FLASHXLA_SHARED_PRODUCT(__half, "f16")
#undef FLASHXLA_SHARED_PRODUCT

// The same for f16 with a in registers and b by rows.
template <int kColumns>
struct RegisterProduct;

template <>
struct RegisterProduct<8> {
  __device__ static void Start(float (&c)[4], const uint32_t (&a)[4], uint64_t b, bool add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %9, 0; "
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {"
        "%0, %1, %2, %3"
        "}, {%4, %5, %6, %7}, %8, p, 1, 1, 0;}"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{add}));
  }
};

template <>
struct RegisterProduct<16> {
  __device__ static void Start(float (&c)[8], const uint32_t (&a)[4], uint64_t b, bool add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %13, 0; "
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7"
        "}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;}"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
          "+f"(c[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{add}));
  }
};

template <>
struct RegisterProduct<32> {
  __device__ static void Start(float (&c)[16], const uint32_t (&a)[4], uint64_t b, bool add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %21, 0; "
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;}"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
          "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]),
          "+f"(c[14]), "+f"(c[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{add}));
  }
};

template <>
struct RegisterProduct<64> {
  __device__ static void Start(float (&c)[32], const uint32_t (&a)[4], uint64_t b, bool add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %37, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
        "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;}"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
          "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]),
          "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]),
          "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]),
          "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{add}));
  }
};

}  // namespace flashxla::attention

#endif  // FLASHXLA_HOPPER

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_SHARED_PRODUCT_CUH_
