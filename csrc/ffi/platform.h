// The platform that the handlers are compiled for: what an FFI call's execution context is, and how
// to make a flashxla_context from it.
#ifndef FLASHXLA_CSRC_FFI_PLATFORM_H_
#define FLASHXLA_CSRC_FFI_PLATFORM_H_

#ifdef FLASHXLA_PLATFORM_CUDA
#include "ffi/platform_cuda.h"
#else
#include "ffi/platform_cpu.h"
#endif

namespace flashxla {

using PlatformArgument = ffi::CtxDecoding<PlatformContext>::Type;

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_FFI_PLATFORM_H_
