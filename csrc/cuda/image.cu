#include <cuda_runtime.h>

#include <atomic>

#include "cuda/image.h"
#include "cuda/launch.h"

namespace flashxla {
namespace {

enum Kind : int { kUnknown = 0, kOld = 1, kEarlyLaunch = 2, kHopperCode = 3 };

constexpr int kUnit = 16;

// Never launched. Its shared memory has a different size in each architecture's code: from that
// size, which the driver reports without any work on the GPU, follows which code is loaded.
__global__ void ImageKernel(char* out) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kKind = kHopperCode;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr int kKind = kEarlyLaunch;
#else
  constexpr int kKind = kOld;
#endif
  __shared__ char tag[kKind * kUnit];
  tag[threadIdx.x] = out[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = tag[threadIdx.x ^ 1];
}

Kind Ask() {
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, ImageKernel) != cudaSuccess) {
    cudaGetLastError();  // no code for this GPU: a launch will report it
    return kOld;
  }
  const int kind = static_cast<int>(attributes.sharedSizeBytes) / kUnit;
  return kind >= kHopperCode ? kHopperCode : kind == kEarlyLaunch ? kEarlyLaunch : kOld;
}

Kind LoadedKind() {
  const int device = CurrentDevice();
  if (device < 0) {
#if defined(FLASHXLA_HAS_HOPPER_CODE)
    return kHopperCode;
#else
    return kOld;
#endif
  }
  constexpr int kDevices = 64;
  static std::atomic<Kind> kinds[kDevices];  // kUnknown at first
  if (device >= kDevices) return Ask();
  Kind kind = kinds[device].load(std::memory_order_relaxed);
  if (kind == kUnknown) kinds[device].store(kind = Ask(), std::memory_order_relaxed);
  return kind;
}

}  // namespace

Image LoadedImage() {
  const Kind kind = LoadedKind();
  return {kind == kHopperCode, kind != kOld};
}

const char* WhyNoHopper() {
  return DeviceAttribute(cudaDevAttrComputeCapabilityMajor, kHopper.major) == kHopper.major
             ? "the library has no code for Hopper: build it with CUDA_ARCHITECTURES=90a"
             : "the GPU is not a Hopper";
}

}  // namespace flashxla
