// The functions of libflashxla_pjrt.so. Call those other than GetPjrtApi before a framework loads
// the library as its plugin. Messages live at least until the thread's next call; null is success.
#ifndef FLASHXLA_CSRC_PJRT_PLUGIN_ADAPTER_H_
#define FLASHXLA_CSRC_PJRT_PLUGIN_ADAPTER_H_

#include <cstddef>
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

// Adds an option to those that a framework creates its client with, in place of one of that name.
// `type` is PJRT's (0 string, 1 int64, 2 list of int64, 3 float, 4 bool), `value` points to `size`
// characters or numbers, which are copied. For frameworks that pass no options of the plugin on.
FLASHXLA_EXPORT void flashxla_pjrt_set_option(const char* name, int32_t type, const void* value,
                                              size_t size);

// Makes the next transfer of the host memory at `host` give a buffer that is the device memory of a
// DLPack tensor (DLManagedTensor). The tensor is deleted together with that buffer.
FLASHXLA_EXPORT void flashxla_pjrt_provide_view(const void* host, void* managed_tensor);

// If a provided view still waits for its transfer, withdraws it and returns 1: the tensor stays the
// caller's. Otherwise returns 0.
FLASHXLA_EXPORT int64_t flashxla_pjrt_withdraw_view(const void* host);

// Shows `seen` the addresses of each program's inputs before it runs, those of each device after
// one another; 0 for an input without one. Null ends it. For proofs that memory stays.
typedef void flashxla_pjrt_watcher(const uintptr_t* addresses, size_t count);
FLASHXLA_EXPORT void flashxla_pjrt_watch_inputs(flashxla_pjrt_watcher* seen);

// A Python capsule, as __dlpack__ returns it, of a DLPack tensor (DLManagedTensor) whose memory
// belongs to the Python object `owner`. The capsule, and later the consumer of the tensor, hold a
// reference to the owner; it is not released any more once the interpreter has ended. The caller
// must hold the GIL. On failure null, with Python's error set.
FLASHXLA_EXPORT void* flashxla_pjrt_new_capsule(void* managed_tensor, void* owner);

// The plugin's table, for a framework built with version 0.72 to 0.117 of the PJRT C API. If no
// plugin is loaded, loads the one at FLASHXLA_PJRT_PLUGIN; on failure null, with a message on
// stderr.
FLASHXLA_EXPORT const void* GetPjrtApi();
}

#endif  // FLASHXLA_CSRC_PJRT_PLUGIN_ADAPTER_H_
