// XLA:GPU on NVIDIA: operations are launched on the runtime's stream. This needs no CUDA headers.
#ifndef FLASHXLA_CSRC_FFI_PLATFORM_CUDA_H_
#define FLASHXLA_CSRC_FFI_PLATFORM_CUDA_H_

#include <initializer_list>

#include "ffi/binding.h"

namespace flashxla {

using PlatformContext = ffi::PlatformStream<void*>;  // a cudaStream_t

// Handlers only launch kernels, so XLA may record them into CUDA graphs. With FLASHXLA_CHECK they
// wait for a result, which is impossible while a graph is recorded.
inline std::initializer_list<ffi::Traits> PlatformTraits() {
  static constexpr std::initializer_list<ffi::Traits> kLaunchesOnly = {
      ffi::Traits::kCmdBufferCompatible};
  return flashxla_check_indices() ? std::initializer_list<ffi::Traits>{} : kLaunchesOnly;
}

inline flashxla_context MakeContext(void* stream) {
  flashxla_context context = {};
  context.stream = stream;
  return context;
}

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_FFI_PLATFORM_CUDA_H_
