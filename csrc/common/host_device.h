// For functions that nvcc compiles for the host and for the device: what the kernels of every
// platform must compute in the same way is written once, as such a function.
//
// They are static: some of the including sources are compiled for other instruction sets, and the
// linker must not use one translation unit's copy in another.
#ifndef FLASHXLA_CSRC_COMMON_HOST_DEVICE_H_
#define FLASHXLA_CSRC_COMMON_HOST_DEVICE_H_

#if defined(__CUDACC__)
#define FLASHXLA_HOST_DEVICE static __host__ __device__ inline
#else
#define FLASHXLA_HOST_DEVICE static inline
#endif

#endif  // FLASHXLA_CSRC_COMMON_HOST_DEVICE_H_
