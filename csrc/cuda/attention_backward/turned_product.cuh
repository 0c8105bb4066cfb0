// A matrix instruction of Hopper's whose operands both lie in shared memory by columns.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_TURNED_PRODUCT_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_TURNED_PRODUCT_CUH_

#include "cuda/attention/hopper.cuh"

#if defined(FLASHXLA_HOPPER)

namespace flashxla::attention_backward {

// c[64 x kColumns] = or += a[16 x 64]^T b[16 x kColumns], with rows as of hopper.cuh.
template <typename T, int kColumns>
struct TurnedProduct;

#define FLASHXLA_TURNED_PRODUCT(T, name)                                                        \
  template <>                                                                                   \
  struct TurnedProduct<T, 32> {                                                                 \
    __device__ static void Start(float (&c)[16], uint64_t a, uint64_t b, bool add) {            \
      asm volatile(                                                                             \
          "{.reg .pred p; setp.ne.b32 p, %18, 0; "                                              \
          "wgmma.mma_async.sync.aligned.m64n32k16.f32." name "." name                           \
          " {"                                                                                  \
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"                \
          "}, %16, %17, p, 1, 1, 1, 1;}"                                                        \
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), \
            "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]),          \
            "+f"(c[13]), "+f"(c[14]), "+f"(c[15])                                               \
          : "l"(a), "l"(b), "r"(int{add}));                                                     \
    }                                                                                           \
  };
FLASHXLA_TURNED_PRODUCT(__nv_bfloat16, "bf16")
FLASHXLA_TURNED_PRODUCT(__half, "f16")
#undef FLASHXLA_TURNED_PRODUCT

#define FLASHXLA_TURNED_PRODUCT(T, name)                                                        \
  template <>                                                                                   \
  struct TurnedProduct<T, 64> {                                                                 \
    __device__ static void Start(float (&c)[32], uint64_t a, uint64_t b, bool add) {            \
      asm volatile(                                                                             \
          "{.reg .pred p; setp.ne.b32 p, %34, 0; "                                              \
          "wgmma.mma_async.sync.aligned.m64n64k16.f32." name "." name                           \
          " {"                                                                                  \
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "              \
          "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"      \
          "}, %32, %33, p, 1, 1, 1, 1;}"                                                        \
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), \
            "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]),          \
            "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]),       \
            "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]),       \
            "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]),       \
            "+f"(c[31])                                                                         \
          : "l"(a), "l"(b), "r"(int{add}));                                                     \
    }                                                                                           \
  };
FLASHXLA_TURNED_PRODUCT(__nv_bfloat16, "bf16")
FLASHXLA_TURNED_PRODUCT(__half, "f16")
#undef FLASHXLA_TURNED_PRODUCT

}  // namespace flashxla::attention_backward

#endif  // FLASHXLA_HOPPER

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_TURNED_PRODUCT_CUH_
