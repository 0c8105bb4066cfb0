#include "ffi/binding.h"

#include <charconv>
#include <cstring>
#include <string>
#include <string_view>

namespace flashxla {
namespace {

// Removes the next part from a list with that separator, and returns it.
std::string_view TakePart(std::string_view* list, char separator = ',') {
  const size_t end = list->find(separator);
  const std::string_view part = list->substr(0, end);
  list->remove_prefix(end == std::string_view::npos ? list->size() : end + 1);
  return part;
}

int64_t Number(std::string_view text) {
  int64_t number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

bool SetDtype(ffi::DataType dtype, flashxla_tensor* tensor) {
  switch (dtype) {
    case ffi::DataType::F32:
      tensor->dtype = FLASHXLA_F32;
      return true;
    case ffi::DataType::F16:
      tensor->dtype = FLASHXLA_F16;
      return true;
    case ffi::DataType::BF16:
      tensor->dtype = FLASHXLA_BF16;
      return true;
    case ffi::DataType::F8E4M3FN:
      tensor->dtype = FLASHXLA_F8E4M3;
      return true;
    case ffi::DataType::F8E5M2:
      tensor->dtype = FLASHXLA_F8E5M2;
      return true;
    case ffi::DataType::U8:
      tensor->dtype = FLASHXLA_U8;
      return true;
    case ffi::DataType::S32:
      tensor->dtype = FLASHXLA_I32;
      return true;
    case ffi::DataType::S64:
      tensor->dtype = FLASHXLA_I64;
      return true;
    default:
      return false;
  }
}

// XLA buffers are dense and row-major.
void SetStrides(flashxla_tensor* tensor) {
  int64_t stride = 1;
  for (int64_t i = tensor->rank - 1; i >= 0; --i) {
    tensor->stride[i] = stride;
    stride *= tensor->shape[i];
  }
}

// A tensor is present if it has an address. Shapes and some empty buffers have none and get this
// one, which is aligned like XLA's buffers.
void* Present(void* data) {
  alignas(256) static char present;
  return data != nullptr ? data : &present;
}

ffi::Error SetTensor(const ffi::AnyBuffer& buffer, const Field& field, flashxla_tensor* tensor) {
  const auto dimensions = buffer.dimensions();
  if (dimensions.size() > FLASHXLA_MAX_RANK || !SetDtype(buffer.element_type(), tensor)) {
    return ffi::Error::InvalidArgument(std::string(field.name) +
                                       ": unsupported rank or element type");
  }
  tensor->data = Present(buffer.untyped_data());
  tensor->rank = static_cast<int64_t>(dimensions.size());
  for (int64_t i = 0; i < tensor->rank; ++i) tensor->shape[i] = dimensions[i];
  SetStrides(tensor);
  return ffi::Error::Success();
}

// Fills in an operation's argument struct.
class Arguments {
 public:
  Arguments(const Operation& operation, char* args) : operation_(operation), args_(args) {}

  flashxla_tensor* tensor(const Field& field) const {
    return reinterpret_cast<flashxla_tensor*>(args_ + field.offset);
  }

  // The tensor field of that name; null if there is none.
  const Field* Find(std::string_view name) const {
    for (int64_t i = 0; i < operation_.num_fields; ++i) {
      const Field& field = operation_.fields[i];
      if (field.is_tensor() && name == field.name) return &field;
    }
    return nullptr;
  }

  ffi::Error SetOperands(std::string_view names, ffi::RemainingArgs operands) const {
    for (size_t i = 0; !names.empty(); ++i) {
      std::string_view name = TakePart(&names);
      name = TakePart(&name, '=');
      const Field* field = Find(name);
      if (field == nullptr) return Unknown(name);
      const auto buffer = operands.get<ffi::AnyBuffer>(i);
      if (buffer.has_error()) return buffer.error();
      if (auto error = SetTensor(*buffer, *field, tensor(*field)); error.failure()) return error;
    }
    return ffi::Error::Success();
  }

  ffi::Error SetResults(std::string_view names, ffi::RemainingRets results) const {
    for (size_t i = 0; !names.empty(); ++i) {
      const std::string_view name = TakePart(&names);
      const Field* field = Find(name);
      if (field == nullptr) return Unknown(name);
      auto buffer = results.get<ffi::AnyBuffer>(i);
      if (buffer.has_error()) return buffer.error();
      const void* operand = tensor(*field)->data;
      if (auto error = SetTensor(**buffer, *field, tensor(*field)); error.failure()) return error;
      if (operand != nullptr && operand != tensor(*field)->data) {
        return ffi::Error::Internal(std::string(name) +
                                    ": the result does not alias its operand; compile the call "
                                    "with output_to_operand_aliasing");
      }
    }
    return ffi::Error::Success();
  }

  // Of the form "q=2[8,32,128],k=...".
  ffi::Error SetShapes(std::string_view shapes) const {
    while (!shapes.empty()) {
      const std::string_view name = TakePart(&shapes, '=');
      const Field* field = Find(name);
      if (field == nullptr) return Unknown(name);
      flashxla_tensor* t = tensor(*field);
      t->data = Present(nullptr);
      t->dtype = Number(TakePart(&shapes, '['));
      std::string_view sizes = TakePart(&shapes, ']');
      for (; !sizes.empty() && t->rank < FLASHXLA_MAX_RANK; ++t->rank) {
        t->shape[t->rank] = Number(TakePart(&sizes));
      }
      SetStrides(t);
      TakePart(&shapes);  // the comma
    }
    return ffi::Error::Success();
  }

  ffi::Error SetScalars(bool plan, ffi::Dictionary attributes) const {
    for (int64_t i = 0; i < operation_.num_fields; ++i) {
      const Field& field = operation_.fields[i];
      if (field.is_tensor() || (plan && field.plan == PlanUse::NONE)) continue;
      if (field.kind == FieldKind::REAL) {
        const auto value = attributes.get<double>(field.name);
        if (value.has_error()) return value.error();
        std::memcpy(args_ + field.offset, &*value, sizeof(double));
      } else {
        const auto value = attributes.get<int64_t>(field.name);
        if (value.has_error()) return value.error();
        std::memcpy(args_ + field.offset, &*value, sizeof(int64_t));
      }
    }
    return ffi::Error::Success();
  }

 private:
  ffi::Error Unknown(std::string_view name) const {
    return ffi::Error::InvalidArgument("flashxla_" + std::string(operation_.name) +
                                       " of this library has no '" + std::string(name) +
                                       "': it was compiled by another version");
  }

  const Operation& operation_;
  char* args_;
};

}  // namespace

ffi::Error Decode(const Operation& operation, bool plan, ffi::RemainingArgs operands,
                  ffi::RemainingRets results, ffi::Dictionary attributes, char* args) {
  const Arguments arguments(operation, args);
  const auto names = attributes.get<std::string_view>("operands");
  if (names.has_error()) return names.error();
  if (auto error = arguments.SetOperands(*names, operands); error.failure()) return error;
  if (plan) {
    const auto shapes = attributes.get<std::string_view>("shapes");
    if (shapes.has_error()) return shapes.error();
    if (auto error = arguments.SetShapes(*shapes); error.failure()) return error;
  }
  const auto result_names = attributes.get<std::string_view>("results");
  if (result_names.has_error()) return result_names.error();
  if (auto error = arguments.SetResults(*result_names, results); error.failure()) return error;
  return arguments.SetScalars(plan, attributes);
}

ffi::Error ToError(flashxla_status status, ffi::Dictionary attributes) {
  if (status == FLASHXLA_OK) return ffi::Error::Success();
  std::string message = flashxla_last_error();
  const auto op = attributes.get<std::string_view>("op");
  const auto operands = attributes.get<std::string_view>("operands");
  if (op.has_value() && operands.has_value()) {
    std::string_view rest = *operands;
    while (!rest.empty()) {
      std::string_view label = TakePart(&rest);
      const std::string_view field = TakePart(&label, '=');
      if (!label.empty() && message.compare(0, field.size(), field) == 0 &&
          std::string_view("[ :").find(message[field.size()]) != std::string_view::npos) {
        message.replace(0, field.size(), label);
        break;
      }
    }
    message = std::string(*op) + ": " + message;
  }
  const ffi::ErrorCode code = status == FLASHXLA_INVALID_ARGUMENT ? ffi::ErrorCode::kInvalidArgument
                              : status == FLASHXLA_OUT_OF_MEMORY
                                  ? ffi::ErrorCode::kResourceExhausted
                                  : ffi::ErrorCode::kInternal;
  return ffi::Error(code, message);
}

}  // namespace flashxla
