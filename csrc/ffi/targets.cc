#include "ffi/targets.h"

#include <string>

#include "ffi/platform.h"

extern "C" {
XLA_FFI_Error* flashxla_ffi_kv_cache(XLA_FFI_CallFrame*);
XLA_FFI_Error* flashxla_ffi_attention(XLA_FFI_CallFrame*);
XLA_FFI_Error* flashxla_ffi_attention_plan(XLA_FFI_CallFrame*);  // cuda
XLA_FFI_Error* flashxla_ffi_merge_states(XLA_FFI_CallFrame*);
}

namespace {

struct Target {
  const char* name;
  XLA_FFI_Handler* handler;
};

constexpr Target kTargets[] = {
    {"flashxla_kv_cache", flashxla_ffi_kv_cache},
    {"flashxla_attention", flashxla_ffi_attention},
#ifdef FLASHXLA_PLATFORM_CUDA
    {"flashxla_attention_plan", flashxla_ffi_attention_plan},
#endif
    {"flashxla_merge_states", flashxla_ffi_merge_states},
};

const Target* TargetAt(int64_t i) {
  return i >= 0 && i < static_cast<int64_t>(std::size(kTargets)) ? &kTargets[i] : nullptr;
}

}  // namespace

const char* flashxla_ffi_target_name(int64_t i) {
  const Target* target = TargetAt(i);
  return target ? target->name : nullptr;
}

void* flashxla_ffi_target_handler(int64_t i) {
  const Target* target = TargetAt(i);
  return target ? reinterpret_cast<void*>(target->handler) : nullptr;
}

const char* flashxla_ffi_register(const void* api, const char* platform) {
  static thread_local std::string message;
  const auto* runtime = static_cast<const XLA_FFI_Api*>(api);
  for (const Target& target : kTargets) {
    XLA_FFI_Error* error =
        xla::ffi::Ffi::RegisterStaticHandler(runtime, target.name, platform, target.handler);
    if (error == nullptr) continue;
    message = std::string(target.name) + ": " + xla::ffi::internal::GetErrorMessage(runtime, error);
    xla::ffi::internal::DestroyError(runtime, error);
    return message.c_str();
  }
  return nullptr;
}

int64_t flashxla_ffi_api_version() { return XLA_FFI_API_MAJOR * 1000 + XLA_FFI_API_MINOR; }

int64_t flashxla_ffi_runtime_api_version(const void* api) {
  const auto& version = static_cast<const XLA_FFI_Api*>(api)->api_version;
  return version.major_version * 1000 + version.minor_version;
}
