// Launching kernels: device facts and errors.
#ifndef FLASHXLA_CSRC_CUDA_LAUNCH_H_
#define FLASHXLA_CSRC_CUDA_LAUNCH_H_

#include <cuda_runtime.h>

#include "common/error.h"
#include "flashxla/common.h"

namespace flashxla {

inline cudaStream_t StreamOf(const flashxla_context* context) {
  return static_cast<cudaStream_t>(context->stream);
}

// Of the current device.
inline int DeviceAttribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&value, attribute, device) != cudaSuccess) {
    cudaGetLastError();  // no device: the launch will say so
    return 0;
  }
  return value;
}

inline int NumMultiprocessors() {
  const int count = DeviceAttribute(cudaDevAttrMultiProcessorCount);
  return count > 0 ? count : 1;
}

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
