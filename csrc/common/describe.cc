// flashxla_describe: the library's structs and operations as JSON.
#include <cstddef>
#include <string>
#include <type_traits>

#include "common/operations.h"
#include "flashxla/common.h"

namespace flashxla {
namespace {

// A JSON object or array under construction.
class Json {
 public:
  explicit Json(char open) : text_(1, open), close_(open == '{' ? '}' : ']') {}

  Json& Add(const std::string& value) {
    if (text_.size() > 1) text_ += ", ";
    text_ += value;
    return *this;
  }
  Json& Add(const char* key, const std::string& value) {
    return Add('"' + std::string(key) + "\": " + value);
  }
  Json& Add(const char* key, int64_t value) { return Add(key, std::to_string(value)); }
  Json& Text(const char* key, const char* value) {
    return Add(key, '"' + std::string(value) + '"');
  }
  std::string Done() const { return text_ + close_; }

 private:
  std::string text_;
  char close_;
};

template <typename T>
constexpr const char* TypeName() {
  if constexpr (std::is_same_v<T, int64_t>) return "int64";
  if constexpr (std::is_same_v<T, const char*>) return "text";
  if constexpr (std::is_same_v<T, flashxla_kernel>) return "kernel";
  if constexpr (std::is_pointer_v<T>) return "pointer";
}

// The members of a struct. None may be left out: host programs compare the struct's size with the
// sum of theirs.
class Members {
 public:
  template <typename T>
  Members& Add(const char* name, int64_t offset) {
    Json member('{');
    member.Text("name", name).Text("type", TypeName<std::remove_extent_t<T>>());
    member.Add("count", std::is_array_v<T> ? static_cast<int64_t>(std::extent_v<T>) : 1);
    list_.Add(member.Add("offset", offset).Done());
    return *this;
  }
  std::string Done(int64_t size) const {
    return Json('{').Add("size", size).Add("fields", list_.Done()).Done();
  }

 private:
  Json list_{'['};
};

#define FLASHXLA_ADD(record, member) \
  Add<decltype(record::member)>(#member, offsetof(record, member))

std::string Records() {
  Json records('{');
  records.Add("tensor", Members()
                            .FLASHXLA_ADD(flashxla_tensor, data)
                            .FLASHXLA_ADD(flashxla_tensor, dtype)
                            .FLASHXLA_ADD(flashxla_tensor, rank)
                            .FLASHXLA_ADD(flashxla_tensor, shape)
                            .FLASHXLA_ADD(flashxla_tensor, stride)
                            .Done(sizeof(flashxla_tensor)));
  records.Add("kernel", Members()
                            .FLASHXLA_ADD(flashxla_kernel, work)
                            .FLASHXLA_ADD(flashxla_kernel, name)
                            .FLASHXLA_ADD(flashxla_kernel, description)
                            .FLASHXLA_ADD(flashxla_kernel, reason)
                            .Done(sizeof(flashxla_kernel)));
  records.Add("needs", Members()
                           .FLASHXLA_ADD(flashxla_needs, plan_bytes)
                           .FLASHXLA_ADD(flashxla_needs, workspace_bytes)
                           .FLASHXLA_ADD(flashxla_needs, num_kernels)
                           .FLASHXLA_ADD(flashxla_needs, kernels)
                           .Done(sizeof(flashxla_needs)));
  records.Add("context", Members()
                             .FLASHXLA_ADD(flashxla_context, parallel_for)
                             .FLASHXLA_ADD(flashxla_context, pool)
                             .FLASHXLA_ADD(flashxla_context, num_threads)
                             .FLASHXLA_ADD(flashxla_context, stream)
                             .FLASHXLA_ADD(flashxla_context, check_indices)
                             .FLASHXLA_ADD(flashxla_context, needs)
                             .FLASHXLA_ADD(flashxla_context, prepare)
                             .Done(sizeof(flashxla_context)));
  return records.Done();
}

constexpr const char* kKindNames[] = {"input",   "result", "plan",  "workspace",
                                      "integer", "layout", "dtype", "real"};
constexpr const char* kPlanUseNames[] = {"read", "static", "none"};

std::string Operations() {
  Json operations('{');
  for (const Operation& operation : kOperations) {
    Json fields('[');
    for (int64_t i = 0; i < operation.num_fields; ++i) {
      const Field& field = operation.fields[i];
      Json json('{');
      json.Text("name", field.name).Text("kind", kKindNames[static_cast<int>(field.kind)]);
      json.Text("plan", kPlanUseNames[static_cast<int>(field.plan)]).Add("offset", field.offset);
      fields.Add(json.Done());
    }
    operations.Add(operation.name,
                   Json('{').Add("size", operation.args_size).Add("fields", fields.Done()).Done());
  }
  return operations.Done();
}

std::string Describe() {
#define FLASHXLA_ENTRY(enumerator, name, value) .Add(#name, value)
  const std::string dtypes = Json('{') FLASHXLA_DTYPES(FLASHXLA_ENTRY).Done();
  const std::string layouts = Json('{') FLASHXLA_LAYOUTS(FLASHXLA_ENTRY).Done();
  Json library('{');
  library.Text("platform", kPlatform).Add("records", Records()).Add("operations", Operations());
  return library.Add("dtypes", dtypes).Add("layouts", layouts).Done();
}

}  // namespace
}  // namespace flashxla

const char* flashxla_describe() {
  static const std::string description = flashxla::Describe();
  return description.c_str();
}
