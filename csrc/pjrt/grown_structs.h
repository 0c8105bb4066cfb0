// A newer plugin refuses the argument structs of an older caller where they have grown since. These
// functions pass such a struct on at its full length, the fields that the caller does not know
// zero, which is what each of them documents as its default, and copy what the caller knows back.
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

  // Gives the caller what the plugin has set.
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

// The plugin's function on a struct at its full length.
template <FunctionIndex kFunction, typename Args>
Error* WithGrown(void* caller) {
  Grown<Args> args(static_cast<Args*>(caller));
  Error* error = Original(kFunction)(args.full());
  args.CopyBack();
  return error;
}

// Execute: what grew is the struct of options that its arguments point to.
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
