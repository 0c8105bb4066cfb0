// Launching kernels: device facts and errors.
#ifndef FLASHXLA_CSRC_CUDA_LAUNCH_H_
#define FLASHXLA_CSRC_CUDA_LAUNCH_H_

#include <cuda_runtime.h>

#include <utility>

#include "common/error.h"
#include "cuda/image.h"
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

// The number of the current device, -1 where there is none.
inline int CurrentDevice() {
  int device = 0;
  if (cudaGetDevice(&device) == cudaSuccess) return device;
  cudaGetLastError();  // a launch will say so
  return -1;
}

// Of the current device.
inline int DeviceAttribute(cudaDeviceAttr attribute, int assumed) {
  int value = 0;
  const int device = CurrentDevice();
  if (device < 0) return assumed;
  if (cudaDeviceGetAttribute(&value, attribute, device) != cudaSuccess) {
    cudaGetLastError();
    return assumed;
  }
  return value;
}

inline int NumMultiprocessors() {
  return DeviceAttribute(cudaDevAttrMultiProcessorCount, kHopper.multiprocessors);
}

// Launches a kernel that may start while the one before it on the stream still runs. It must call
// AwaitPrevious() before it touches memory and on every path (what follows it counts on that), and
// the one before allows it with AllowNext(). Code for older GPUs, which cannot wait, starts late.
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
  config.numAttrs = LoadedImage().early_launch;
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

// The status that an error of CUDA's becomes.
inline flashxla_status CudaStatus(const char* op, cudaError_t error) {
  if (error == cudaSuccess) return FLASHXLA_OK;
  const bool no_code = error == cudaErrorNoKernelImageForDevice ||
                       error == cudaErrorUnsupportedPtxVersion ||
                       error == cudaErrorInvalidDeviceFunction;
  return SetError(
      error == cudaErrorMemoryAllocation ? FLASHXLA_OUT_OF_MEMORY : FLASHXLA_DEVICE_ERROR,
      "%s: CUDA: %s%s", op, cudaGetErrorString(error),
      no_code ? "; the library was built without code for this GPU: name its compute capability in "
                "CUDA_ARCHITECTURES"
              : "");
}

// The status of the launches so far.
inline flashxla_status LaunchStatus(const char* op) { return CudaStatus(op, cudaGetLastError()); }

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CUDA_LAUNCH_H_
