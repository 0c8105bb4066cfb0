// Decodes an XLA FFI call into an operation's C ABI struct.
//
// Every target has one calling convention, so that an operation is two tables and a function:
//   operands   the present tensors, in the order of the struct; attribute `operands` is a bit mask
//              that tells which (bit i: the i-th tensor of kInputs)
//   results    the present ones in the order of kResults; attribute `results` is their bit mask. A
//              result that updates an operand in place is aliased to it
//              (output_to_operand_aliasing)
//   attributes the scalars of the struct by name, i64 or f64; `op` and `arguments` say what the
//              caller calls the operation and, separated by commas, each tensor of kInputs
#ifndef FLASHXLA_CSRC_FFI_BINDING_H_
#define FLASHXLA_CSRC_FFI_BINDING_H_

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "flashxla/common.h"
#include "xla/ffi/api/ffi.h"

namespace flashxla {

namespace ffi = xla::ffi;

template <typename Args>
struct TensorField {
  const char* name;
  flashxla_tensor Args::* field;
};

template <typename Args, typename T>
struct ScalarField {
  const char* name;
  T Args::* field;
};

inline bool SetDtype(ffi::DataType dtype, flashxla_tensor* tensor) {
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
inline ffi::Error SetTensor(const ffi::AnyBuffer& buffer, const char* name,
                            flashxla_tensor* tensor) {
  const auto dimensions = buffer.dimensions();
  if (dimensions.size() > FLASHXLA_MAX_RANK || !SetDtype(buffer.element_type(), tensor)) {
    return ffi::Error::InvalidArgument(std::string(name) + ": unsupported rank or element type");
  }
  // An empty buffer may have no address, yet its argument is present.
  static char empty;
  tensor->data = buffer.untyped_data() ? buffer.untyped_data() : &empty;
  tensor->rank = static_cast<int64_t>(dimensions.size());
  int64_t stride = 1;
  for (int64_t i = tensor->rank - 1; i >= 0; --i) {
    tensor->shape[i] = dimensions[i];
    tensor->stride[i] = stride;
    stride *= dimensions[i];
  }
  return ffi::Error::Success();
}

template <typename Op>
ffi::Error Decode(ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attrs,
                  typename Op::Args* args) {
  const auto operand_mask = attrs.get<int64_t>("operands");
  if (operand_mask.has_error()) return operand_mask.error();
  size_t operand = 0;
  size_t bit = 0;
  for (const auto& input : Op::kInputs) {
    if (!((*operand_mask >> bit++) & 1)) continue;
    const auto buffer = operands.get<ffi::AnyBuffer>(operand++);
    if (buffer.has_error()) return buffer.error();
    if (auto error = SetTensor(*buffer, input.name, &(args->*input.field)); error.failure()) {
      return error;
    }
  }
  const auto result_mask = attrs.get<int64_t>("results");
  if (result_mask.has_error()) return result_mask.error();
  size_t result = 0;
  bit = 0;
  for (const auto& output : Op::kResults) {
    if (!((*result_mask >> bit++) & 1)) continue;
    auto buffer = results.get<ffi::AnyBuffer>(result++);
    if (buffer.has_error()) return buffer.error();
    flashxla_tensor* tensor = &(args->*output.field);
    const void* operand_data = tensor->data;  // set above if this result updates an operand
    if (auto error = SetTensor(**buffer, output.name, tensor); error.failure()) return error;
    if (operand_data != nullptr && operand_data != tensor->data) {
      return ffi::Error::Internal(std::string(output.name) +
                                  ": the result does not alias its operand; compile the call with "
                                  "output_to_operand_aliasing");
    }
  }
  for (const auto& scalar : Op::kIntegers) {
    const auto value = attrs.get<int64_t>(scalar.name);
    if (value.has_error()) return value.error();
    args->*scalar.field = *value;
  }
  for (const auto& scalar : Op::kFloats) {
    const auto value = attrs.get<double>(scalar.name);
    if (value.has_error()) return value.error();
    args->*scalar.field = *value;
  }
  return ffi::Error::Success();
}

// The error of a failed call, in the caller's words: a message that starts with the field
// `seqused_k` of an operation that knows it as `context_lens` starts with that.
template <typename Op>
ffi::Error ToError(flashxla_status status, ffi::Dictionary attrs) {
  if (status == FLASHXLA_OK) return ffi::Error::Success();
  std::string message = flashxla_last_error();
  const auto op = attrs.get<std::string_view>("op");
  const auto arguments = attrs.get<std::string_view>("arguments");
  if (op.has_value() && arguments.has_value()) {
    std::string_view rest = *arguments;
    for (const auto& input : Op::kInputs) {
      const std::string_view argument = rest.substr(0, rest.find(','));
      rest.remove_prefix(std::min(rest.size(), argument.size() + 1));
      const std::string_view field = input.name;
      if (message.compare(0, field.size(), field) == 0 &&
          std::string_view("[ :").find(message[field.size()]) != std::string_view::npos) {
        message.replace(0, field.size(), argument);
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

#endif  // FLASHXLA_CSRC_FFI_BINDING_H_
