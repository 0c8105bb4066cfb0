#include "plugin.h"

#include <dlfcn.h>

#include <stdexcept>

namespace example {
namespace {

void* Open(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(dlerror());
  return library;
}

template <typename T>
T* Find(void* library, const std::string& path, const char* name, const char* what) {
  auto* function = reinterpret_cast<T*>(dlsym(library, name));
  if (function == nullptr) {
    throw std::runtime_error(path + ": it has no function " + name + ": it is no " + what);
  }
  return function;
}

const pjrt::FfiExtension* FindFfi(const pjrt::Extension* extension) {
  for (; extension != nullptr; extension = extension->next) {
    if (extension->type == pjrt::kFfiExtension &&
        extension->struct_size >= sizeof(pjrt::FfiExtension)) {
      return reinterpret_cast<const pjrt::FfiExtension*>(extension);
    }
  }
  return nullptr;
}

// The arguments of a function, all else zero.
template <typename Args>
Args New() {
  Args args = {};
  args.struct_size = sizeof(args);
  return args;
}

// CompileOptionsProto { executable_build_options { num_replicas: 1 num_partitions: 1 } }
constexpr char kOneDevice[] = {0x1a, 4, 0x20, 1, 0x28, 1};
constexpr char kFormat[] = "mlir";

}  // namespace

Plugin::Plugin(const std::string& path) {
  void* library = Open(path);
  api_ = Find<const pjrt::Api*()>(library, path, "GetPjrtApi", "PJRT plugin")();
  if (api_ == nullptr) throw std::runtime_error(path + ": its GetPjrtApi gives no table");
  const auto& version = api_->pjrt_api_version;
  if (version.major_version != pjrt::kMajor || version.minor_version < pjrt::kOldestMinor ||
      version.minor_version > pjrt::kNewestMinor ||
      api_->struct_size < sizeof(pjrt::Api) + pjrt::kNumFunctions * sizeof(void*)) {
    throw std::runtime_error(
        path + ": it has version " + std::to_string(version.major_version) + "." +
        std::to_string(version.minor_version) + " of the PJRT C API; accepted: 0." +
        std::to_string(pjrt::kOldestMinor) + " to 0." + std::to_string(pjrt::kNewestMinor));
  }
  functions_ = reinterpret_cast<pjrt::Function* const*>(api_ + 1);
  ffi_ = FindFfi(api_->extension_start);
  if (ffi_ == nullptr) {
    throw std::runtime_error(path + ": it has no FFI extension that registers custom calls");
  }
  auto args = New<pjrt::PluginInitializeArgs>();
  Call(pjrt::kPluginInitialize, &args);
}

void Plugin::Call(pjrt::FunctionIndex function, void* args) const {
  Check(functions_[function](args));
}

void Plugin::Check(pjrt::Error* error) const {
  if (error == nullptr) return;
  auto message = New<pjrt::ErrorMessageArgs>();
  message.error = error;
  functions_[pjrt::kErrorMessage](&message);
  const std::string text(message.message, message.message_size);
  auto destroy = New<pjrt::ErrorDestroyArgs>();
  destroy.error = error;
  functions_[pjrt::kErrorDestroy](&destroy);
  throw std::runtime_error(text);
}

std::vector<std::string> Plugin::RegisterCustomCalls(const std::string& library,
                                                     const std::string& platform) const {
  constexpr char kWhat[] = "library of flashxla's kernels";
  void* handle = Open(library);
  auto* name_at = Find<const char*(int64_t)>(handle, library, "flashxla_ffi_target_name", kWhat);
  auto* handler_at = Find<void*(int64_t)>(handle, library, "flashxla_ffi_target_handler", kWhat);
  std::vector<std::string> names;
  while (const char* name = name_at(static_cast<int64_t>(names.size()))) {
    auto args = New<pjrt::FfiRegisterHandlerArgs>();
    args.target_name = name;
    args.target_name_size = std::char_traits<char>::length(name);
    args.handler = handler_at(static_cast<int64_t>(names.size()));
    args.platform_name = platform.data();
    args.platform_name_size = platform.size();
    names.emplace_back(name);
    Check(ffi_->register_handler(&args));
  }
  return names;
}

void Plugin::Await(pjrt::Event* event) const {
  auto destroy = New<pjrt::EventDestroyArgs>();
  destroy.event = event;
  const std::shared_ptr<pjrt::Event> owned(
      event, [this, &destroy](pjrt::Event*) { functions_[pjrt::kEventDestroy](&destroy); });
  auto args = New<pjrt::EventAwaitArgs>();
  args.event = event;
  Call(pjrt::kEventAwait, &args);
}

Buffer::Buffer(const Plugin& plugin, pjrt::Buffer* buffer)
    : plugin_(&plugin), buffer_(buffer, [&plugin](pjrt::Buffer* owned) {
        auto args = New<pjrt::BufferDestroyArgs>();
        args.buffer = owned;
        plugin.Call(pjrt::kBufferDestroy, &args);
      }) {}

void Buffer::CopyToHost(void* destination, size_t bytes) const {
  auto args = New<pjrt::BufferToHostBufferArgs>();
  args.src = get();
  args.dst = destination;
  args.dst_size = bytes;
  plugin_->Call(pjrt::kBufferToHostBuffer, &args);
  plugin_->Await(args.event);
}

uintptr_t Buffer::address() const {
  auto args = New<pjrt::BufferUnsafePointerArgs>();
  args.buffer = get();
  plugin_->Call(pjrt::kBufferUnsafePointer, &args);
  return args.buffer_pointer;
}

Executable::Executable(const Plugin& plugin, pjrt::LoadedExecutable* executable, size_t num_results)
    : plugin_(&plugin),
      executable_(executable,
                  [&plugin](pjrt::LoadedExecutable* owned) {
                    auto args = New<pjrt::LoadedExecutableDestroyArgs>();
                    args.executable = owned;
                    plugin.Call(pjrt::kLoadedExecutableDestroy, &args);
                  }),
      num_results_(num_results) {}

std::vector<Buffer> Executable::Execute(const std::vector<pjrt::Buffer*>& arguments) const {
  std::vector<pjrt::Buffer*> results(num_results_);
  pjrt::Buffer* const* const argument_lists[] = {arguments.data()};
  pjrt::Buffer** result_lists[] = {results.data()};
  auto options = New<pjrt::ExecuteOptions>();
  auto args = New<pjrt::LoadedExecutableExecuteArgs>();
  args.executable = executable_.get();
  args.options = &options;
  args.argument_lists = argument_lists;
  args.num_devices = 1;
  args.num_args = arguments.size();
  args.output_lists = result_lists;
  plugin_->Call(pjrt::kLoadedExecutableExecute, &args);
  std::vector<Buffer> buffers;
  for (pjrt::Buffer* result : results) buffers.emplace_back(*plugin_, result);
  return buffers;
}

Device::Device(const Plugin& plugin) : plugin_(&plugin) {
  auto create = New<pjrt::ClientCreateArgs>();
  plugin.Call(pjrt::kClientCreate, &create);
  client_ = std::shared_ptr<pjrt::Client>(create.client, [&plugin](pjrt::Client* owned) {
    auto args = New<pjrt::ClientDestroyArgs>();
    args.client = owned;
    plugin.Call(pjrt::kClientDestroy, &args);
  });
  auto devices = New<pjrt::ClientAddressableDevicesArgs>();
  devices.client = client_.get();
  plugin.Call(pjrt::kClientAddressableDevices, &devices);
  if (devices.num_addressable_devices == 0) throw std::runtime_error("the plugin has no device");
  device_ = devices.addressable_devices[0];
}

std::string Device::platform() const {
  auto args = New<pjrt::ClientPlatformNameArgs>();
  args.client = client_.get();
  plugin_->Call(pjrt::kClientPlatformName, &args);
  return {args.platform_name, args.platform_name_size};
}

Executable Device::Compile(const std::string& stablehlo, size_t num_results) const {
  auto program = New<pjrt::Program>();
  program.code = stablehlo.data();
  program.code_size = stablehlo.size();
  program.format = kFormat;
  program.format_size = sizeof(kFormat) - 1;
  auto args = New<pjrt::ClientCompileArgs>();
  args.client = client_.get();
  args.program = &program;
  args.compile_options = kOneDevice;
  args.compile_options_size = sizeof(kOneDevice);
  plugin_->Call(pjrt::kClientCompile, &args);
  return {*plugin_, args.executable, num_results};
}

Buffer Device::CopyFromHost(const void* data, int32_t type,
                            const std::vector<int64_t>& shape) const {
  auto args = New<pjrt::ClientBufferFromHostBufferArgs>();
  args.client = client_.get();
  args.data = data;
  args.type = type;
  args.dims = shape.data();
  args.num_dims = shape.size();
  args.host_buffer_semantics = pjrt::kImmutableUntilTransferCompletes;
  args.device = device_;
  plugin_->Call(pjrt::kClientBufferFromHostBuffer, &args);
  Buffer buffer(*plugin_, args.buffer);
  plugin_->Await(args.done_with_host_buffer);
  return buffer;
}

}  // namespace example
