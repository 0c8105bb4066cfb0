// A newer plugin refuses an older caller's argument structs if they have grown since. These
// functions pass such a struct on at its full length and copy the caller's part back. Fields that
// the caller does not know are zero, which is their documented default.
#ifndef FLASHXLA_CSRC_PJRT_GROWN_STRUCTS_H_
#define FLASHXLA_CSRC_PJRT_GROWN_STRUCTS_H_

#include <algorithm>
#include <cstring>

#include "pjrt/plugin.h"

namespace flashxla::pjrt {

// A caller's struct at the full length of T.
template <typename T>
class Grown {
 public:
  explicit Grown(T* caller) : caller_(caller), known_(std::min(caller->struct_size, sizeof(T))) {
    std::memcpy(static_cast<void*>(&full_), caller, known_);
    full_.struct_size = std::max(caller->struct_size, sizeof(T));
  }

  T* full() { return known_ < sizeof(T) ? &full_ : caller_; }

  // Copies what the plugin has set to the caller's struct.
  void CopyBack() {
    if (known_ == sizeof(T)) return;
    full_.struct_size = caller_->struct_size;
    std::memcpy(static_cast<void*>(caller_), &full_, known_);
  }

 private:
  T* caller_;
  size_t known_;
  T full_ = {};
};

// Calls the plugin's function with the struct at its full length.
template <FunctionIndex kFunction, typename Args>
Error* WithGrown(void* caller) {
  Grown<Args> args(static_cast<Args*>(caller));
  Error* error = Original(kFunction)(args.full());
  args.CopyBack();
  return error;
}

// Execute, whose arguments point to a struct of options that has grown.
inline Error* ExecuteWithGrownOptions(void* caller) {
  auto* args = static_cast<LoadedExecutableExecuteArgs*>(caller);
  ExecuteOptions* const callers_options = args->options;
  if (callers_options == nullptr) return Original(kLoadedExecutableExecute)(args);
  Grown<ExecuteOptions> options(callers_options);
  args->options = options.full();
  Error* error = Original(kLoadedExecutableExecute)(args);
  args->options = callers_options;
  options.CopyBack();
  return error;
}

}  // namespace flashxla::pjrt

#endif  // FLASHXLA_CSRC_PJRT_GROWN_STRUCTS_H_
