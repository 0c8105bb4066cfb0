#include "pjrt/own_errors.h"

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "pjrt/plugin.h"

namespace flashxla::pjrt {
namespace {

std::mutex mutex;

// By the address that the caller has. Never destroyed, as frameworks use the table until the end.
std::map<const Error*, std::unique_ptr<std::string>>& Live() {
  static auto* live = new std::map<const Error*, std::unique_ptr<std::string>>;
  return *live;
}

// The text of an error of the adapter; null for one of the plugin.
const std::string* Find(const Error* error) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = Live().find(error);
  return found == Live().end() ? nullptr : found->second.get();
}

}  // namespace

Error* Unimplemented(std::string message) {
  auto text = std::make_unique<std::string>(std::move(message));
  auto* error = reinterpret_cast<Error*>(text.get());
  const std::lock_guard<std::mutex> lock(mutex);
  Live()[error] = std::move(text);
  return error;
}

Error* ErrorDestroy(void* caller) {
  auto* args = static_cast<ErrorDestroyArgs*>(caller);
  if (Find(args->error) == nullptr) return Original(kErrorDestroy)(caller);
  const std::lock_guard<std::mutex> lock(mutex);
  Live().erase(args->error);
  return nullptr;
}

Error* ErrorMessage(void* caller) {
  auto* args = static_cast<ErrorMessageArgs*>(caller);
  const std::string* text = Find(args->error);
  if (text == nullptr) return Original(kErrorMessage)(caller);
  args->message = text->data();
  args->message_size = text->size();
  return nullptr;
}

Error* ErrorGetCode(void* caller) {
  auto* args = static_cast<ErrorGetCodeArgs*>(caller);
  if (Find(args->error) == nullptr) return Original(kErrorGetCode)(caller);
  args->code = kUnimplementedCode;
  return nullptr;
}

Error* ErrorForEachPayload(void* caller) {
  auto* args = static_cast<ErrorForEachPayloadArgs*>(caller);
  return Find(args->error) == nullptr ? Original(kErrorForEachPayload)(caller) : nullptr;
}

}  // namespace flashxla::pjrt
