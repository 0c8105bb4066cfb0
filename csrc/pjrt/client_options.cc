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

// An option's characters or numbers.
struct Value {
  int32_t type;
  size_t size;
  std::string bytes;
};

std::mutex mutex;

std::map<std::string, Value>& Added() {
  static auto* added = new std::map<std::string, Value>;
  return *added;
}

std::string NameOf(const NamedValue& option) { return {option.name, option.name_size}; }

size_t BytesOfOne(int32_t type) {
  if (type == kInt64Value || type == kInt64ListValue) return sizeof(int64_t);
  return type == kFloatValue ? sizeof(float) : 1;
}

NamedValue View(const std::string& name, const Value& value) {
  NamedValue option = {};
  option.struct_size = sizeof(option);
  option.name = name.data();
  option.name_size = name.size();
  option.type = value.type;
  option.value_size = value.size;
  if (value.type == kStringValue) {
    option.string_value = value.bytes.data();
  } else if (value.type == kInt64ListValue) {
    option.int64_array_value = reinterpret_cast<const int64_t*>(value.bytes.data());
  } else {
    std::memcpy(&option.int64_value, value.bytes.data(), value.bytes.size());  // one number
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
  const auto* bytes = static_cast<const char*>(value);
  const std::lock_guard<std::mutex> lock(mutex);
  Added()[name] = {type, size, {bytes, bytes + size * BytesOfOne(type)}};
}
