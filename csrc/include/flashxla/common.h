// flashxla C ABI: types that every operation shares.
//
// The ABI knows pointers, strides, sizes and scalars; no XLA, Torch or Python type. Every scalar
// field is eight bytes wide, so the structs have no padding and are easy to mirror (native.py
// does).
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

typedef enum flashxla_dtype {
  FLASHXLA_F32 = 0,
  FLASHXLA_F16 = 1,
  FLASHXLA_BF16 = 2,
  FLASHXLA_F8E4M3 = 3,  // finite only ("fn"): no infinity, one NaN
  FLASHXLA_F8E5M2 = 4,
  FLASHXLA_U8 = 5,  // raw fp8 bytes: the op's kv_cache_dtype names their format
  FLASHXLA_I32 = 6,
  FLASHXLA_I64 = 7,
} flashxla_dtype;

// How a K/V cache lies in memory. P blocks, B block size, Hk heads, D head size.
typedef enum flashxla_layout {
  FLASHXLA_NHD = 0,          // two tensors [P, B, Hk, D]
  FLASHXLA_HND = 1,          // two tensors [P, Hk, B, D]
  FLASHXLA_INTERLEAVED = 2,  // one tensor [P, B, 2*Hk, D], K at even heads
  FLASHXLA_PACKED_HND = 3,   // one tensor [P, Hk, B, 2*D], K in the first half
  FLASHXLA_PACKED_NHD = 4,   // one tensor [P, B, Hk, 2*D]
  FLASHXLA_STACKED = 5,      // one tensor [2, P, B, Hk, D]
} flashxla_layout;

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

// Runs body(arg, i) for every i in [0, n), each once, in any order and possibly in parallel.
typedef void (*flashxla_parallel_for)(void* pool, int64_t n, void (*body)(void* arg, int64_t i),
                                      void* arg);

// Where an operation runs.
typedef struct flashxla_context {
  flashxla_parallel_for parallel_for;  // cpu: NULL means the library's own threads
  void* pool;                          // cpu: handed to parallel_for
  int64_t num_threads;                 // cpu: how many threads parallel_for can use
  void* stream;                        // cuda: the cudaStream_t to launch on
  int64_t check_indices;               // refuse bad index tensors instead of skipping the entries
} flashxla_context;

// The message of the last failed call on this thread.
FLASHXLA_EXPORT const char* flashxla_last_error(void);

// 1 if the environment variable FLASHXLA_CHECK is 1. Read once a process.
FLASHXLA_EXPORT int64_t flashxla_check_indices(void);

// The instruction set that the CPU kernels use: "baseline", "avx2" or "avx512"; the best one that
// this machine runs, or what the environment variable FLASHXLA_CPU_ISA names. NULL, with a message,
// where that cannot be; every operation then fails. The variable is read once a process.
FLASHXLA_EXPORT const char* flashxla_cpu_instruction_set(void);

#ifdef __cplusplus
}
#endif

#endif  // FLASHXLA_COMMON_H_
