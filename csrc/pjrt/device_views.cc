#include "pjrt/device_views.h"

#include <mutex>
#include <unordered_map>

#include "pjrt/dlpack.h"
#include "pjrt/plugin.h"
#include "pjrt/plugin_adapter.h"

namespace flashxla::pjrt {
namespace {

std::mutex mutex;

std::unordered_map<const void*, ManagedTensor*>& Waiting() {
  static auto* waiting = new std::unordered_map<const void*, ManagedTensor*>;
  return *waiting;
}

// Removes and returns the view that waits for a transfer of this address; null if there is none.
ManagedTensor* Take(const void* host) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto& waiting = Waiting();
  const auto found = waiting.find(host);
  if (found == waiting.end()) return nullptr;
  ManagedTensor* tensor = found->second;
  waiting.erase(found);
  return tensor;
}

void Delete(void*, void* tensor) {
  auto* managed = static_cast<ManagedTensor*>(tensor);
  if (managed->deleter != nullptr) managed->deleter(managed);
}

}  // namespace

Error* BufferFromHostBufferOrView(void* caller) {
  auto* args = static_cast<ClientBufferFromHostBufferArgs*>(caller);
  ManagedTensor* tensor = Take(args->data);
  if (tensor == nullptr) return Original(kClientBufferFromHostBuffer)(caller);

  ClientCreateViewOfDeviceBufferArgs view = {};
  view.struct_size = sizeof(view);
  view.client = args->client;
  view.device_buffer_ptr = static_cast<char*>(tensor->data) + tensor->byte_offset;
  view.dims = args->dims;
  view.num_dims = args->num_dims;
  view.element_type = args->type;
  view.layout = args->device_layout;
  view.device = args->device;
  view.memory = args->memory;
  view.on_delete_callback = Delete;
  view.on_delete_callback_arg = tensor;
  if (Error* error = Original(kClientCreateViewOfDeviceBuffer)(&view)) {
    Delete(nullptr, tensor);
    return error;
  }
  // Nothing reads the host memory; the caller waits for this event before it frees it.
  BufferReadyEventArgs ready = {sizeof(ready), nullptr, view.buffer, nullptr};
  if (Error* error = Original(kBufferReadyEvent)(&ready)) {
    BufferDestroyArgs destroy = {sizeof(destroy), nullptr, view.buffer};
    Original(kBufferDestroy)(&destroy);
    return error;
  }
  args->buffer = view.buffer;
  args->done_with_host_buffer = ready.event;
  return nullptr;
}

}  // namespace flashxla::pjrt

void flashxla_pjrt_provide_view(const void* host, void* managed_tensor) {
  using namespace flashxla::pjrt;
  const std::lock_guard<std::mutex> lock(mutex);
  Waiting()[host] = static_cast<ManagedTensor*>(managed_tensor);
}

int64_t flashxla_pjrt_withdraw_view(const void* host) {
  return flashxla::pjrt::Take(host) != nullptr;
}
