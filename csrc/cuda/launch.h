// Launching kernels: device properties, programmatic dependent launch (PDL), grids, errors.
#ifndef FLASHXLA_CSRC_CUDA_LAUNCH_H_
#define FLASHXLA_CSRC_CUDA_LAUNCH_H_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "common/error.h"
#include "cuda/image.h"
#include "flashxla/common.h"

namespace flashxla {

inline cudaStream_t StreamOf(const flashxla_context* context) {
  return static_cast<cudaStream_t>(context->stream);
}

// The GPU that is assumed if there is none, since programs can be compiled without one.
struct Assumed {
  int major, multiprocessors, shared;
};
constexpr Assumed kHopper = {9, 132, 227 * 1024};

// The index of the current device; -1 if there is none.
inline int CurrentDevice() {
  int device = 0;
  if (cudaGetDevice(&device) == cudaSuccess) return device;
  cudaGetLastError();  // a launch will report it
  return -1;
}

// An attribute of the current device; `assumed` if there is none.
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

// Whether a thread block can have so many bytes of shared memory.
inline bool HasSharedMemory(int64_t bytes) {
  return bytes <= DeviceAttribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, kHopper.shared);
}

// Programmatic dependent launch (PDL): the kernel may start while the previous kernel of the stream
// still runs, as soon as all blocks of that one have called TriggerNext() or ended. The kernel must
// call WaitForPrevious() on every path, before it touches memory: it returns when the previous
// kernel is complete. Every path, because the next kernel only waits for this one, and must be able
// to rely on all earlier ones. Code for GPUs before Hopper has no PDL and starts after the previous
// kernel.
//
// A launch fetches the instructions of its kernel, even though it cannot start yet, and a large one
// (of 125 KB, say) so displaces those of the kernel that runs, which then takes some 10% longer.
// A kernel that a large one follows calls TriggerNext() at its end.
//
// A kernel that needs nothing of the previous one may wait for it at its end, if that one calls
// TriggerNext() after WaitForPrevious(): what came before both is complete then. (PTX lets only a
// kernel that waits count on what others wrote. This one finds it in L2, where it was before the
// previous kernel went on, unless its multiprocessor has older bytes in L1. Those that ran a block
// of the previous kernel have none.)
template <typename... Parameters, typename... Arguments>
void LaunchDependent(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, int shared_bytes,
                     cudaStream_t stream, Arguments&&... arguments) {
  if (shared_bytes > 0) {  // a launch allows 48 KB unless told
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  }
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = LoadedImage().early_launch;
  cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

#if defined(__CUDACC__)
// PDL: waits until the previous kernel of the stream is complete.
__device__ inline void WaitForPrevious() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// PDL: allows the next kernel of the stream to start.
__device__ inline void TriggerNext() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#endif

// Blocks and threads for a kernel in which thread (x, y) takes column x of a token for token y,
// then the `tokens_each` - 1 tokens that lie a block's height apart.
struct TokenGrid {
  dim3 grid, block;
  bool fits;  // in what CUDA can launch

  TokenGrid(int64_t num_columns, int64_t num_tokens, int64_t threads, int64_t tokens_each) {
    constexpr int64_t kMaxGridY = 65535;
    const int64_t grid_y = (num_columns + threads - 1) / threads;
    const int64_t width = (num_columns + grid_y - 1) / grid_y;
    const int64_t height = std::min(threads / width, num_tokens);
    const int64_t block_tokens = height * tokens_each;
    const int64_t grid_x = (num_tokens + block_tokens - 1) / block_tokens;
    fits = grid_y <= kMaxGridY && grid_x <= INT32_MAX;
    grid = dim3(static_cast<unsigned>(grid_x), static_cast<unsigned>(grid_y));
    block = dim3(static_cast<unsigned>(width), static_cast<unsigned>(height));
  }
};

// The status for an error of CUDA.
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
