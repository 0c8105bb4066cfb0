// The PJRT C API, as much of it as running a program takes. Errors are std::runtime_error.
#ifndef RUN_WITHOUT_PYTHON_PLUGIN_H_
#define RUN_WITHOUT_PYTHON_PLUGIN_H_

#include <memory>
#include <string>
#include <vector>

#include "pjrt/pjrt_abi.h"

namespace example {

namespace pjrt = flashxla::pjrt;

// A PJRT plugin, a shared library that holds XLA for one kind of device.
class Plugin {
 public:
  explicit Plugin(const std::string& path);

  // Calls a function of the plugin. Throws its error.
  void Call(pjrt::FunctionIndex function, void* args) const;

  // Registers the custom calls of a library of flashxla, libflashxla_cpu.so or libflashxla_cuda.so,
  // for a platform: "Host" or "CUDA". Returns their names.
  std::vector<std::string> RegisterCustomCalls(const std::string& library,
                                               const std::string& platform) const;

  // Waits for an event and destroys it.
  void Await(pjrt::Event* event) const;

 private:
  void Check(pjrt::Error* error) const;

  const pjrt::Api* api_;
  pjrt::Function* const* functions_;
  const pjrt::FfiExtension* ffi_;
};

// Memory on the device.
class Buffer {
 public:
  Buffer(const Plugin& plugin, pjrt::Buffer* buffer);

  pjrt::Buffer* get() const { return buffer_.get(); }
  void CopyToHost(void* destination, size_t bytes) const;
  // Where it lies in the device's memory.
  uintptr_t address() const;

 private:
  const Plugin* plugin_;
  std::shared_ptr<pjrt::Buffer> buffer_;
};

// A compiled program.
class Executable {
 public:
  Executable(const Plugin& plugin, pjrt::LoadedExecutable* executable, size_t num_results);

  // Runs it. Arguments that the program takes over (donated ones) are gone after that.
  std::vector<Buffer> Execute(const std::vector<pjrt::Buffer*>& arguments) const;

 private:
  const Plugin* plugin_;
  std::shared_ptr<pjrt::LoadedExecutable> executable_;
  size_t num_results_;
};

// The first device of a plugin.
class Device {
 public:
  explicit Device(const Plugin& plugin);

  // "cpu", "cuda".
  std::string platform() const;
  Executable Compile(const std::string& stablehlo, size_t num_results) const;
  Buffer CopyFromHost(const void* data, int32_t type, const std::vector<int64_t>& shape) const;

 private:
  const Plugin* plugin_;
  std::shared_ptr<pjrt::Client> client_;
  pjrt::Device* device_;
};

}  // namespace example

#endif  // RUN_WITHOUT_PYTHON_PLUGIN_H_
