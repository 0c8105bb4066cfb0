#include "pjrt/torch_tpu.h"

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "pjrt/own_errors.h"
#include "pjrt/plugin.h"

namespace flashxla::pjrt {
namespace {

constexpr char kDevice[] = "device";

Error* ChipCount(void* caller) {
  static_cast<TpuTopologyChipCountArgs*>(caller)->chip_count = 1;
  return nullptr;
}

template <size_t kIndex>
Error* OnlyOfATpu(void*) {
  return Unimplemented("flashxla: the framework asks for function " + std::to_string(kIndex) +
                       " of the PJRT extension TpuTopology, which only TPUs have");
}

template <size_t... kIndices>
void FillWithErrors(Function** functions, std::index_sequence<kIndices...>) {
  ((functions[kIndices] = OnlyOfATpu<kIndices>), ...);
}

// Arrays of `count` times "device" and its length. They live as long as the process.
struct Kinds {
  std::vector<const char*> names;
  std::vector<size_t> sizes;
};

const Kinds& DeviceTimes(size_t count) {
  static std::mutex mutex;
  static auto* all = new std::vector<Kinds*>;  // each at least twice as long as the one before
  const std::lock_guard<std::mutex> lock(mutex);
  if (all->empty() || all->back()->names.size() < count) {
    const size_t longer = std::max<size_t>(2 * count, 64);
    all->push_back(new Kinds{std::vector<const char*>(longer, kDevice),
                             std::vector<size_t>(longer, sizeof(kDevice) - 1)});
  }
  return *all->back();
}

int32_t CodeOf(const Error* error) {
  ErrorGetCodeArgs args = {sizeof(args), nullptr, error, 0};
  Original(kErrorGetCode)(&args);
  return args.code;
}

}  // namespace

Error* ExecutableOutputMemoryKinds(void* caller) {
  Error* error = Original(kExecutableOutputMemoryKinds)(caller);
  if (error == nullptr || CodeOf(error) != kUnimplementedCode) return error;
  ErrorDestroyArgs destroy = {sizeof(destroy), nullptr, error};
  Original(kErrorDestroy)(&destroy);
  auto* args = static_cast<ExecutableOutputMemoryKindsArgs*>(caller);
  ExecutableNumOutputsArgs outputs = {sizeof(outputs), nullptr, args->executable, 0};
  if (Error* failed = Original(kExecutableNumOutputs)(&outputs)) return failed;
  const Kinds& kinds = DeviceTimes(outputs.num_outputs);
  args->num_outputs = outputs.num_outputs;
  args->memory_kinds = kinds.names.data();
  args->memory_kind_sizes = kinds.sizes.data();
  return nullptr;
}

Extension* TpuTopology(Extension* next) {
  static auto* topology = new TpuTopologyExtension;
  topology->base = {sizeof(TpuTopologyExtension), kTpuTopologyExtension, next};
  FillWithErrors(topology->functions, std::make_index_sequence<kNumTpuTopologyFunctions>());
  topology->functions[kTpuTopologyChipCount] = ChipCount;
  return &topology->base;
}

}  // namespace flashxla::pjrt
