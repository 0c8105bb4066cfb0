// flashxla C ABI: types that every operation shares.
//
// The ABI knows pointers, strides, sizes and scalars; no XLA, Torch or Python type.
// flashxla_describe() tells a host program how the compiler laid the structs out, so that none of
// them is stated a second time anywhere.
#ifndef FLASHXLA_COMMON_H_
#define FLASHXLA_COMMON_H_

#include <stdint.h>

#if defined(__GNUC__)
#define FLASHXLA_EXPORT __attribute__((visibility("default")))
#else
#define FLASHXLA_EXPORT
#endif

#ifdef __cplusplus
extern "C" {
#endif

// Element types: E(enumerator, name, value).
#define FLASHXLA_DTYPES(E)                                              \
  E(F32, float32, 0)                                                    \
  E(F16, float16, 1)                                                    \
  E(BF16, bfloat16, 2)                                                  \
  E(F8E4M3, float8_e4m3fn, 3) /* finite only: no infinity, one NaN */   \
  E(F8E5M2, float8_e5m2, 4)                                             \
  E(U8, uint8, 5) /* raw fp8 bytes: a DTYPE field names their format */ \
  E(I32, int32, 6)                                                      \
  E(I64, int64, 7)

// How a K/V cache lies in memory: E(enumerator, name, value). P blocks, B block size, Hk heads, Dk
// and Dv the head sizes of keys and values, which are one D in the one-tensor layouts.
#define FLASHXLA_LAYOUTS(E)                                                            \
  E(NHD, NHD, 0)                 /* two tensors [P, B, Hk, Dk] and [P, B, Hk, Dv] */   \
  E(HND, HND, 1)                 /* two tensors [P, Hk, B, Dk] and [P, Hk, B, Dv] */   \
  E(INTERLEAVED, interleaved, 2) /* one tensor [P, B, 2*Hk, D], K at even heads */     \
  E(PACKED_HND, packed_HND, 3)   /* one tensor [P, Hk, B, 2*D], K in the first half */ \
  E(PACKED_NHD, packed_NHD, 4)   /* one tensor [P, B, Hk, 2*D] */                      \
  E(STACKED, stacked, 5)         /* one tensor [2, P, B, Hk, D] */

#define FLASHXLA_ENUMERATOR(enumerator, name, value) FLASHXLA_##enumerator = value,
typedef enum flashxla_dtype { FLASHXLA_DTYPES(FLASHXLA_ENUMERATOR) } flashxla_dtype;
typedef enum flashxla_layout { FLASHXLA_LAYOUTS(FLASHXLA_ENUMERATOR) } flashxla_layout;
#undef FLASHXLA_ENUMERATOR

typedef enum flashxla_status {
  FLASHXLA_OK = 0,
  FLASHXLA_INVALID_ARGUMENT = 1,
  FLASHXLA_OUT_OF_MEMORY = 2,
  FLASHXLA_DEVICE_ERROR = 3,  // the GPU or its driver failed
  FLASHXLA_INTERNAL = 4,      // a defect of the library
} flashxla_status;

#define FLASHXLA_MAX_RANK 5

// A tensor by address. data == NULL: the argument is absent.
typedef struct flashxla_tensor {
  void* data;
  int64_t dtype;  // flashxla_dtype
  int64_t rank;
  int64_t shape[FLASHXLA_MAX_RANK];
  int64_t stride[FLASHXLA_MAX_RANK];  // in elements
} flashxla_tensor;

// A kernel, and what of a call's work it serves.
typedef struct flashxla_kernel {
  const char* work;         // such as "all queries" or "few queries"
  const char* name;         // such as "split"
  const char* description;  // such as "tensor cores, split-KV"
  const char* reason;  // why the fastest kernel for this work cannot serve it; empty if it does
} flashxla_kernel;

#define FLASHXLA_MAX_KERNELS 4

// What a call needs beside its arguments, and which kernels serve it.
typedef struct flashxla_needs {
  // Of the plan: what depends on the index tensors and not on the data, so that calls that share
  // those can share the plan. 0: the operation has none.
  int64_t plan_bytes;
  int64_t workspace_bytes;  // of the call as it is given: with a plan it needs less than without
  int64_t num_kernels;
  flashxla_kernel kernels[FLASHXLA_MAX_KERNELS];
} flashxla_needs;

// Runs body(arg, i) for every i in [0, n), each once, in any order and possibly in parallel.
typedef void (*flashxla_parallel_for)(void* pool, int64_t n, void (*body)(void* arg, int64_t i),
                                      void* arg);

// Where an operation runs, and what of it.
typedef struct flashxla_context {
  flashxla_parallel_for parallel_for;  // cpu: NULL means the library's own threads
  void* pool;                          // cpu: handed to parallel_for
  int64_t num_threads;                 // cpu: how many threads parallel_for can use
  void* stream;                        // cuda: the cudaStream_t to launch on
  int64_t check_indices;               // refuse bad index tensors instead of skipping the entries
  // Not NULL: nothing runs; what the call needs goes there. It follows from shapes, strides, dtypes
  // and scalars: tensors that are present have some address, which is not read.
  flashxla_needs* needs;
  // 1: nothing runs but the making of the plan. Of the tensors, those that the plan is made from
  // (READ in the operation's fields) have their data, the others some address.
  int64_t prepare;
} flashxla_context;

// The message of the last failed call on this thread.
FLASHXLA_EXPORT const char* flashxla_last_error(void);

// The library as JSON: `platform`; `records`, the structs above, and `operations`, their argument
// structs, each with its size and its fields (name, type or kind, offset); `dtypes` and `layouts`.
FLASHXLA_EXPORT const char* flashxla_describe(void);

// 1 if the environment variable FLASHXLA_CHECK is 1. Read once a process.
FLASHXLA_EXPORT int64_t flashxla_check_indices(void);

// The instruction set that the CPU kernels use: "baseline", "avx2", "avx512" or "avx512_bf16"; the
// best one that this machine runs, or what the environment variable FLASHXLA_CPU_ISA names. NULL,
// with a message, where that cannot be; every operation then fails. The variable is read once a
// process.
FLASHXLA_EXPORT const char* flashxla_cpu_instruction_set(void);

// cpu: a flashxla_parallel_for on the threads of an OpenMP runtime. pool: its function
// GOMP_parallel, which the runtimes of GCC, LLVM and Intel have. The team is the one that the
// calling thread's other loops have, so num_threads should be omp_get_max_threads().
FLASHXLA_EXPORT void flashxla_openmp_parallel_for(void* pool, int64_t n,
                                                  void (*body)(void* arg, int64_t i), void* arg);

#ifdef __cplusplus
}
#endif

#endif  // FLASHXLA_COMMON_H_
