// Launching kernels: device facts and errors.
#ifndef FLASHXLA_CSRC_CUDA_LAUNCH_H_
#define FLASHXLA_CSRC_CUDA_LAUNCH_H_

#include <cuda_runtime.h>

#include <utility>

#include "common/error.h"
#include "flashxla/common.h"

namespace flashxla {

inline cudaStream_t StreamOf(const flashxla_context* context) {
  return static_cast<cudaStream_t>(context->stream);
}

// What is assumed where there is no GPU to ask: programs can be compiled without one.
struct Assumed {
  int major, multiprocessors, shared;
};
constexpr Assumed kHopper = {9, 132, 227 * 1024};

// Of the current device.
inline int DeviceAttribute(cudaDeviceAttr attribute, int assumed) {
  int device = 0, value = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&value, attribute, device) != cudaSuccess) {
    cudaGetLastError();  // a launch will say so
    return assumed;
  }
  return value;
}

inline int NumMultiprocessors() {
  return DeviceAttribute(cudaDevAttrMultiProcessorCount, kHopper.multiprocessors);
}

inline bool IsHopper() {
  return DeviceAttribute(cudaDevAttrComputeCapabilityMajor, kHopper.major) == 9;
}

// Launches a kernel that may start while the one before it on the stream still runs. It must call
// AwaitPrevious() before it touches memory and on every path (what follows it counts on that), and
// the one before allows it with AllowNext().
template <typename... Parameters, typename... Arguments>
void LaunchEarly(void (*kernel)(Parameters...), dim3 blocks, int threads, int shared_bytes,
                 cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = DeviceAttribute(cudaDevAttrComputeCapabilityMajor, kHopper.major) >= 9;
  cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

#if defined(__CUDACC__)
__device__ inline void AwaitPrevious() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ inline void AllowNext() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#endif

// The status of the launches so far.
inline flashxla_status LaunchStatus(const char* op) {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return FLASHXLA_OK;
  return SetError(
      error == cudaErrorMemoryAllocation ? FLASHXLA_OUT_OF_MEMORY : FLASHXLA_INVALID_ARGUMENT,
      "%s: CUDA: %s", op, cudaGetErrorString(error));
}

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CUDA_LAUNCH_H_
