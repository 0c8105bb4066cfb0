// C entry points with which a host program registers the handlers of this library.
#ifndef FLASHXLA_CSRC_FFI_TARGETS_H_
#define FLASHXLA_CSRC_FFI_TARGETS_H_

#include <stdint.h>

#include "flashxla/common.h"

extern "C" {

// The i-th custom call target, or NULL past the last: its name and its XLA_FFI_Handler*.
FLASHXLA_EXPORT const char* flashxla_ffi_target_name(int64_t i);
FLASHXLA_EXPORT void* flashxla_ffi_target_handler(int64_t i);

// Registers every target with the XLA runtime behind `api` (an XLA_FFI_Api*) for `platform`
// ("Host", "CUDA"). Returns NULL, or what went wrong (valid until the next call on this thread).
FLASHXLA_EXPORT const char* flashxla_ffi_register(const void* api, const char* platform);

// major * 1000 + minor of the XLA FFI API: of this library, and of the runtime behind `api`.
FLASHXLA_EXPORT int64_t flashxla_ffi_api_version(void);
FLASHXLA_EXPORT int64_t flashxla_ffi_runtime_api_version(const void* api);
}

#endif  // FLASHXLA_CSRC_FFI_TARGETS_H_
