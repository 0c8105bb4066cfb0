// A PJRT plugin that wraps JAX's plugin for NVIDIA GPUs, so that PyTorch/XLA 2.9 and TorchTPU can
// use it. JAX's plugin has a newer API version than PyTorch/XLA, which also aborts on the platform
// name "cuda". TorchTPU asks for what only TPUs have.
#include "pjrt/plugin_adapter.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "pjrt/client_options.h"
#include "pjrt/device_views.h"
#include "pjrt/grown_structs.h"
#include "pjrt/own_errors.h"
#include "pjrt/plugin.h"
#include "pjrt/torch_tpu.h"
#include "pjrt/watched_inputs.h"

namespace flashxla::pjrt {
namespace {

// What PyTorch/XLA 2.9 refuses, and what it takes instead. Its devices are then called GPU:0, ...
constexpr char kCuda[] = "cuda";
constexpr char kGpu[] = "gpu";

struct Loaded {
  std::string path;
  const Api* plugin = nullptr;
  std::vector<char> table;
};

std::mutex mutex;

// Never destroyed: frameworks still call the table while the process ends.
Loaded& TheLoaded() {
  static auto* loaded = new Loaded;
  return *loaded;
}

Error* PlatformName(void* caller) {
  Error* error = Original(kClientPlatformName)(caller);
  if (error != nullptr) return error;
  auto* args = static_cast<ClientPlatformNameArgs*>(caller);
  if (std::string(args->platform_name, args->platform_name_size) == kCuda) {
    args->platform_name = kGpu;
    args->platform_name_size = sizeof(kGpu) - 1;
  }
  return nullptr;
}

std::string Version(int major, int minor) {
  return std::to_string(major) + "." + std::to_string(minor);
}

const std::string& Accepted() {
  static const auto* text =
      new std::string(Version(kMajor, kOldestMinor) + " to " + Version(kMajor, kNewestMinor));
  return *text;
}

// Why a plugin's table can't be adapted; empty if it can.
std::string Refusal(const Api& plugin) {
  const ApiVersion& version = plugin.pjrt_api_version;
  if (version.major_version == kMajor && version.minor_version >= kOldestMinor &&
      version.minor_version <= kNewestMinor) {
    return "";
  }
  return "it has version " + Version(version.major_version, version.minor_version) +
         " of the PJRT C API; accepted: " + Accepted() +
         ", which jax-cuda12-pjrt and jax-cuda13-pjrt 0.7.2 to 0.12.0.1 have";
}

void Adapt(std::vector<char>& table) {
  auto* api = reinterpret_cast<Api*>(table.data());
  auto* functions = reinterpret_cast<Function**>(table.data() + sizeof(Api));
  api->extension_start = TpuTopology(api->extension_start);
  functions[kErrorDestroy] = ErrorDestroy;
  functions[kErrorMessage] = ErrorMessage;
  functions[kErrorGetCode] = ErrorGetCode;
  if (table.size() >= sizeof(Api) + (kErrorForEachPayload + 1) * sizeof(Function*)) {
    functions[kErrorForEachPayload] = ErrorForEachPayload;
  }
  functions[kClientCreate] = ClientCreate;
  functions[kClientPlatformName] = PlatformName;
  functions[kLoadedExecutableExecute] = ExecuteWatched;
  functions[kDeviceMemoryStats] = WithGrown<kDeviceMemoryStats, DeviceMemoryStatsArgs>;
  functions[kExecutableDeserializeAndLoad] =
      WithGrown<kExecutableDeserializeAndLoad, ExecutableDeserializeAndLoadArgs>;
  functions[kExecutableGetCompiledMemoryStats] =
      WithGrown<kExecutableGetCompiledMemoryStats, ExecutableGetCompiledMemoryStatsArgs>;
  functions[kExecutableOutputMemoryKinds] = ExecutableOutputMemoryKinds;
  functions[kClientBufferFromHostBuffer] = BufferFromHostBufferOrView;
}

std::string Load(const std::string& path) {
  Loaded& loaded = TheLoaded();
  if (loaded.plugin != nullptr) {
    return loaded.path == path ? "" : "the plugin " + loaded.path + " is loaded already";
  }
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return dlerror();
  auto* get_api = reinterpret_cast<const Api* (*)()>(dlsym(library, "GetPjrtApi"));
  if (get_api == nullptr) return "it has no function GetPjrtApi: it is no PJRT plugin";
  const Api* plugin = get_api();
  if (plugin == nullptr) return "its GetPjrtApi gives no table";
  if (std::string refusal = Refusal(*plugin); !refusal.empty()) return refusal;
  if (plugin->struct_size < sizeof(Api) + kNumFunctions * sizeof(Function*)) {
    return "its table is shorter than its version of the PJRT C API says";
  }
  const char* bytes = reinterpret_cast<const char*>(plugin);
  loaded.table.assign(bytes, bytes + plugin->struct_size);
  Adapt(loaded.table);
  loaded.path = path;
  loaded.plugin = plugin;
  return "";
}

const char* Message(std::string text) {
  static thread_local std::string message;
  message = std::move(text);
  return message.c_str();
}

std::string TakeMessage(Error* error) {
  ErrorMessageArgs args = {sizeof(args), nullptr, error, nullptr, 0};
  Original(kErrorMessage)(&args);
  std::string message(args.message, args.message_size);
  ErrorDestroyArgs destroy = {sizeof(destroy), nullptr, error};
  Original(kErrorDestroy)(&destroy);
  return message;
}

}  // namespace

const Api* Plugin() { return TheLoaded().plugin; }

}  // namespace flashxla::pjrt

using namespace flashxla::pjrt;

const char* flashxla_pjrt_load(const char* path) {
  const std::lock_guard<std::mutex> lock(mutex);
  const std::string problem = Load(path);
  return problem.empty() ? nullptr : Message(std::string(path) + ": " + problem);
}

int64_t flashxla_pjrt_api_version() {
  const Api* plugin = Plugin();
  if (plugin == nullptr) return -1;
  const ApiVersion& version = plugin->pjrt_api_version;
  return int64_t{version.major_version} * 1000 + version.minor_version;
}

const char* flashxla_pjrt_accepted_versions() { return Accepted().c_str(); }

const char* flashxla_pjrt_register_ffi(const char* target, void* handler, const char* platform) {
  if (Plugin() == nullptr) return "no plugin is loaded";
  for (Extension* one = Plugin()->extension_start; one != nullptr; one = one->next) {
    if (one->type != kFfiExtension || one->struct_size < sizeof(FfiExtension)) continue;
    FfiRegisterHandlerArgs args = {
        sizeof(args), target, std::strlen(target), handler, platform, std::strlen(platform), 0};
    auto* register_handler = reinterpret_cast<FfiExtension*>(one)->register_handler;
    if (register_handler == nullptr) continue;
    Error* error = register_handler(&args);
    return error == nullptr ? nullptr : Message(std::string(target) + ": " + TakeMessage(error));
  }
  return "the plugin has no FFI extension that registers handlers";
}

const void* GetPjrtApi() {
  if (Plugin() == nullptr) {
    const char* path = std::getenv("FLASHXLA_PJRT_PLUGIN");
    const char* problem =
        path ? flashxla_pjrt_load(path) : "FLASHXLA_PJRT_PLUGIN does not name a plugin";
    if (problem != nullptr) {
      std::fprintf(stderr, "flashxla: the PJRT plugin can't be used: %s\n", problem);
      return nullptr;
    }
  }
  return TheLoaded().table.data();
}
