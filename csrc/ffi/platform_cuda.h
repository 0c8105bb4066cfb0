// XLA:GPU on NVIDIA: operations are launched on the runtime's stream. Nothing here needs CUDA's
// headers.
#ifndef FLASHXLA_CSRC_FFI_PLATFORM_CUDA_H_
#define FLASHXLA_CSRC_FFI_PLATFORM_CUDA_H_

#include <initializer_list>

#include "ffi/binding.h"

// The library function of this platform: FLASHXLA_FUNCTION(attention) is flashxla_cuda_attention.
#define FLASHXLA_FUNCTION(op) flashxla_cuda_##op

namespace flashxla {

using PlatformContext = ffi::PlatformStream<void*>;  // a cudaStream_t

// Handlers only launch, so that XLA can record them into CUDA graphs; the check of the index
// tensors waits for its result, which it cannot while it is being recorded.
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
