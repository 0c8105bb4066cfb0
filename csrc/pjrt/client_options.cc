#include "pjrt/client_options.h"

#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "pjrt/plugin.h"
#include "pjrt/plugin_adapter.h"

namespace flashxla::pjrt {
namespace {

// Of TorchTPU 0.2: the size of a pool of pinned host memory.
constexpr char kOptionOfTpus[] = "premapped_buffer_size";

struct Value {
  int32_t type;
  std::string text;
  std::vector<int64_t> numbers;
  float real;
  bool flag;
};

std::mutex mutex;

std::map<std::string, Value>& Added() {
  static auto* added = new std::map<std::string, Value>;
  return *added;
}

std::string NameOf(const NamedValue& option) { return {option.name, option.name_size}; }

NamedValue View(const std::string& name, const Value& value) {
  NamedValue option = {};
  option.struct_size = sizeof(option);
  option.name = name.data();
  option.name_size = name.size();
  option.type = value.type;
  option.value_size = 1;
  switch (value.type) {
    case kStringValue:
      option.string_value = value.text.data();
      option.value_size = value.text.size();
      break;
    case kInt64Value:
      option.int64_value = value.numbers[0];
      break;
    case kInt64ListValue:
      option.int64_array_value = value.numbers.data();
      option.value_size = value.numbers.size();
      break;
    case kFloatValue:
      option.float_value = value.real;
      break;
    default:
      option.bool_value = value.flag;
  }
  return option;
}

}  // namespace

Error* ClientCreate(void* caller) {
  auto* args = static_cast<ClientCreateArgs*>(caller);
  const NamedValue* const callers_options = args->create_options;
  const size_t callers_count = args->num_options;
  const std::lock_guard<std::mutex> lock(mutex);
  std::vector<NamedValue> options;
  for (size_t i = 0; i < callers_count; ++i) {
    const std::string name = NameOf(callers_options[i]);
    if (name != kOptionOfTpus && Added().count(name) == 0) options.push_back(callers_options[i]);
  }
  for (const auto& [name, value] : Added()) options.push_back(View(name, value));
  args->create_options = options.data();
  args->num_options = options.size();
  Error* error = Original(kClientCreate)(caller);
  args->create_options = callers_options;
  args->num_options = callers_count;
  return error;
}

}  // namespace flashxla::pjrt

void flashxla_pjrt_set_option(const char* name, int32_t type, const void* value, size_t size) {
  using namespace flashxla::pjrt;
  Value copy = {type, {}, {}, 0, false};
  if (type == kStringValue) copy.text.assign(static_cast<const char*>(value), size);
  if (type == kInt64Value || type == kInt64ListValue) {
    const auto* numbers = static_cast<const int64_t*>(value);
    copy.numbers.assign(numbers, numbers + size);
  }
  if (type == kFloatValue) copy.real = *static_cast<const float*>(value);
  if (type == kBoolValue) copy.flag = *static_cast<const bool*>(value);
  const std::lock_guard<std::mutex> lock(mutex);
  Added()[name] = copy;
}
