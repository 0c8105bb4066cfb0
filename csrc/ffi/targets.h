// C functions with which a host program registers this library's handlers.
#ifndef FLASHXLA_CSRC_FFI_TARGETS_H_
#define FLASHXLA_CSRC_FFI_TARGETS_H_

#include <stdint.h>

#include "flashxla/common.h"

extern "C" {

// The name and the XLA_FFI_Handler* of the i-th custom call target; NULL past the last one.
FLASHXLA_EXPORT const char* flashxla_ffi_target_name(int64_t i);
FLASHXLA_EXPORT void* flashxla_ffi_target_handler(int64_t i);

// Registers every target with the XLA runtime behind `api` (an XLA_FFI_Api*) for `platform`
// ("Host", "CUDA"). Returns NULL, or what went wrong (valid until the next call on this thread).
FLASHXLA_EXPORT const char* flashxla_ffi_register(const void* api, const char* platform);

// The XLA FFI API version of this library, and of the runtime behind `api`: major * 1000 + minor.
FLASHXLA_EXPORT int64_t flashxla_ffi_api_version(void);
FLASHXLA_EXPORT int64_t flashxla_ffi_runtime_api_version(const void* api);
}

#endif  // FLASHXLA_CSRC_FFI_TARGETS_H_
