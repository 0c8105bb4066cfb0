// The platform that the handlers are compiled for: how an FFI call's execution context becomes a
// flashxla_context, and which library function serves it. cpu.h and cuda.h define the same names.
#ifndef FLASHXLA_CSRC_FFI_PLATFORM_H_
#define FLASHXLA_CSRC_FFI_PLATFORM_H_

#ifdef FLASHXLA_CUDA
#include "ffi/platform_cuda.h"
#else
#include "ffi/platform_cpu.h"
#endif

#endif  // FLASHXLA_CSRC_FFI_PLATFORM_H_
