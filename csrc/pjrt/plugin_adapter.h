// What libflashxla_pjrt.so offers beside GetPjrtApi: to be called before a framework loads it as
// its plugin. Messages are static or live until the thread's next call; null is success.
#ifndef FLASHXLA_CSRC_PJRT_PLUGIN_ADAPTER_H_
#define FLASHXLA_CSRC_PJRT_PLUGIN_ADAPTER_H_

#include <cstdint>

#include "flashxla/common.h"

extern "C" {

// Loads the plugin at `path` and makes the table that GetPjrtApi returns. A second call with the
// same path does nothing; another path is an error, since the framework may hold the first table.
FLASHXLA_EXPORT const char* flashxla_pjrt_load(const char* path);

// The loaded plugin's API version as major * 1000 + minor; -1 before one is loaded.
FLASHXLA_EXPORT int64_t flashxla_pjrt_api_version();

// The versions that a plugin may have: "0.76 to 0.117".
FLASHXLA_EXPORT const char* flashxla_pjrt_accepted_versions();

// Registers an XLA FFI handler with the runtime inside the plugin, for its platform ("CUDA").
FLASHXLA_EXPORT const char* flashxla_pjrt_register_ffi(const char* target, void* handler,
                                                       const char* platform);

// The next transfer of the host memory at `host` gives a buffer that is the device memory of a
// DLPack tensor (DLManagedTensor) instead. The tensor is deleted when that buffer is.
FLASHXLA_EXPORT void flashxla_pjrt_provide_view(const void* host, void* managed_tensor);

// Whether a view that was provided is still waiting for its transfer; if so it is withdrawn, and
// the tensor stays the caller's.
FLASHXLA_EXPORT int64_t flashxla_pjrt_withdraw_view(const void* host);

// A Python capsule, as __dlpack__ returns it, of a DLPack tensor (DLManagedTensor) that is
// `owner`'s, a Python object: the capsule, and then who takes the tensor, hold a reference to the
// owner. Once the interpreter ends they hold it for good. To be called with the GIL; null with
// Python's error set.
FLASHXLA_EXPORT void* flashxla_pjrt_new_capsule(void* managed_tensor, void* owner);

// The table of the plugin for a framework made with version 0.72 to 0.117 of the PJRT C API. Loads
// the plugin at FLASHXLA_PJRT_PLUGIN if none is loaded; null, with a message on stderr, if that
// fails.
FLASHXLA_EXPORT const void* GetPjrtApi();
}

#endif  // FLASHXLA_CSRC_PJRT_PLUGIN_ADAPTER_H_
