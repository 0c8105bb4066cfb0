// A PJRT plugin without a device, for the tests of the adapter. It checks argument structs as real
// plugins do, records what it is called with, and writes every output that its version has.
//
// Its structs are written down here a second time, from the API's definition, so that a wrong one
// in csrc/pjrt/pjrt_abi.h does not go unseen. The environment says how it behaves:
//   STUB_VERSION  the API version that it claims (0.117)
//   STUB_TABLE    "none": GetPjrtApi returns null
//   STUB_FFI      "none": no FFI extension; "short": one of the time before register_handler
//   STUB_FAIL     the function that returns an error, after it has written its outputs
//   STUB_PLATFORM its name (cuda)
//   STUB_KINDS    "none": it has no Executable_OutputMemoryKinds, as XLA's plugin for CPUs
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <utility>

namespace {

#define END_OF(type, field) (offsetof(type, field) + sizeof(type::field))

struct Error {
  std::string message;
  int code;
};

using Function = Error*(void* args);

struct Extension {
  size_t struct_size;
  int type;
  Extension* next;
};

constexpr size_t kFunctions = 138;

struct Table {
  size_t struct_size;
  Extension* extension_start;
  struct {
    size_t struct_size;
    Extension* extension_start;
    int major_version;
    int minor_version;
  } version;
  Function* functions[kFunctions];
};

// The first fields of every argument struct.
struct Head {
  size_t struct_size;
  Extension* extension_start;
};

struct ErrorDestroy {
  Head head;
  Error* error;
};

struct ErrorMessage {
  Head head;
  const Error* error;
  const char* message;
  size_t message_size;
};

struct ErrorGetCode {
  Head head;
  const Error* error;
  int code;
};

struct ErrorForEachPayload {
  Head head;
  const Error* error;
  void* visitor;
  void* user_arg;
};

struct NamedValue {
  Head head;
  const char* name;
  size_t name_size;
  int type;
  union {
    const char* text;
    int64_t number;
    const int64_t* numbers;
    float real;
    bool flag;
  };
  size_t value_size;
};

struct ClientCreate {
  Head head;
  const NamedValue* create_options;
  size_t num_options;
  void* kv_get_callback;
  void* kv_get_user_arg;
  void* kv_put_callback;
  void* kv_put_user_arg;
  void* client;
  void* kv_try_get_callback;
  void* kv_try_get_user_arg;
};

struct NumOutputs {
  Head head;
  void* executable;
  size_t num_outputs;
};

struct OutputMemoryKinds {
  Head head;
  void* executable;
  size_t num_outputs;
  const char* const* memory_kinds;
  const size_t* memory_kind_sizes;
};

struct PlatformName {
  Head head;
  void* client;
  const char* platform_name;
  size_t platform_name_size;
};

struct BufferFromHostBuffer {
  Head head;
  void* client;
  const void* data;
  int type;
  const int64_t* dims;
  size_t num_dims;
  const int64_t* byte_strides;
  size_t num_byte_strides;
  int host_buffer_semantics;
  void* device;
  void* memory;
  void* device_layout;
  void* done_with_host_buffer;
  void* buffer;
};

struct CreateView {
  Head head;
  void* client;
  void* device_buffer_ptr;
  const int64_t* dims;
  size_t num_dims;
  int element_type;
  void* layout;
  void* device;
  void (*on_delete_callback)(void* device_buffer_ptr, void* user_arg);
  void* on_delete_callback_arg;
  intptr_t stream;
  void* buffer;
  void* memory;
};

struct BufferDestroy {
  Head head;
  void* buffer;
};

struct ReadyEvent {
  Head head;
  void* buffer;
  void* event;
};

struct UnsafePointer {
  Head head;
  void* buffer;
  uintptr_t buffer_pointer;
};

struct ExecuteOptions {
  Head head;
  void** send_callbacks;
  void** recv_callbacks;
  size_t num_send_ops;
  size_t num_recv_ops;
  int launch_id;
  const int64_t* non_donatable_input_indices;
  size_t num_non_donatable_input_indices;
  void* context;
  const char* call_location;
  size_t num_tasks;
  int* task_ids;
  int64_t* incarnation_ids;
  void* multi_slice_config;
  bool use_major_to_minor_data_layout_for_callbacks;
  void* hlo_output_callbacks;
  size_t num_hlo_output_callbacks;
  const void* custom_options;
  size_t num_custom_options;
};

struct Execute {
  Head head;
  void* executable;
  ExecuteOptions* options;
  void* argument_lists;
  size_t num_devices;
  size_t num_args;
  void* output_lists;
  void** device_complete_events;
  void* execute_device;
};

struct MemoryStats {
  Head head;
  void* device;
  int64_t bytes_in_use;
  int64_t peak_bytes_in_use;
  bool peak_bytes_in_use_is_set;
  int64_t num_allocs;
  bool num_allocs_is_set;
  int64_t largest_alloc_size;
  bool largest_alloc_size_is_set;
  int64_t bytes_limit;
  bool bytes_limit_is_set;
  int64_t bytes_reserved;
  bool bytes_reserved_is_set;
  int64_t peak_bytes_reserved;
  bool peak_bytes_reserved_is_set;
  int64_t bytes_reservable_limit;
  bool bytes_reservable_limit_is_set;
  int64_t largest_free_block_bytes;
  bool largest_free_block_bytes_is_set;
  int64_t pool_bytes;
  bool pool_bytes_is_set;
  int64_t peak_pool_bytes;
  bool peak_pool_bytes_is_set;
  int64_t peak_allocated_bytes;
  bool peak_allocated_bytes_is_set;
};

struct DeserializeAndLoad {
  Head head;
  void* client;
  const char* serialized_executable;
  size_t serialized_executable_size;
  void* loaded_executable;
  const char* overridden_serialized_compile_options;
  size_t overridden_serialized_compile_options_size;
  void* load_options;
};

struct CompiledMemoryStats {
  Head head;
  void* executable;
  int64_t generated_code_size_in_bytes;
  int64_t argument_size_in_bytes;
  int64_t output_size_in_bytes;
  int64_t alias_size_in_bytes;
  int64_t temp_size_in_bytes;
  int64_t host_generated_code_size_in_bytes;
  int64_t host_argument_size_in_bytes;
  int64_t host_output_size_in_bytes;
  int64_t host_alias_size_in_bytes;
  int64_t host_temp_size_in_bytes;
  int64_t peak_memory_in_bytes;
  int64_t total_size_in_bytes;
  int64_t total_allocation_bytes;
  int64_t indefinite_allocations;
  int64_t peak_unpadded_heap_bytes;
};

struct RegisterHandler {
  size_t struct_size;
  const char* target_name;
  size_t target_name_size;
  void* handler;
  const char* platform_name;
  size_t platform_name_size;
  int traits;
};

struct FfiExtension {
  Extension base;
  void* type_register;
  void* user_data_add;
  Error* (*register_handler)(void* args);
};

// What the test reads: the latest call of a function, before the stub wrote its outputs.
struct Seen {
  int64_t calls;
  const void* args;
  size_t size;  // as the caller states it
  const Error* error;
  unsigned char bytes[256];
};

// The names and texts of the latest FFI registration.
struct Registered {
  char target[64];
  char platform[64];
  void* handler;
  int traits;
};

Registered registered;
char options[256];  // of the latest Client_Create: name=value;...
int live_errors = 0;

std::string Setting(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : otherwise;
}

int Minor() {
  const std::string version = Setting("STUB_VERSION", "0.117");
  return std::atoi(version.c_str() + version.find('.') + 1);
}

Seen& SeenBy(const std::string& function) {
  static auto* all = new std::map<std::string, Seen>;
  return (*all)[function];
}

constexpr int kUnimplemented = 12, kInternal = 13;

Error* NewError(const std::string& message, int code = kInternal) {
  ++live_errors;
  return new Error{message, code};
}

// Records a call; an error if its struct is shorter than the plugin's.
Error* Enter(const std::string& function, const char* suffix, const void* args, size_t wanted) {
  Seen& seen = SeenBy(function);
  ++seen.calls;
  seen.args = args;
  seen.error = nullptr;
  std::memcpy(&seen.size, args, sizeof(seen.size));
  std::memcpy(seen.bytes, args, std::min(seen.size, sizeof(seen.bytes)));
  if (seen.size >= wanted) return nullptr;
  Error* error = NewError("Unexpected PJRT_" + function + suffix + " size: expected " +
                          std::to_string(wanted) + ", got " + std::to_string(seen.size));
  seen.error = error;
  return error;
}

// The result of a function that has written its outputs.
Error* Leave(const std::string& function) {
  if (Setting("STUB_FAIL", "") != function) return nullptr;
  Error* error = NewError(function + " was told to fail");
  SeenBy(function).error = error;
  return error;
}

Error* DoErrorDestroy(void* raw) {
  auto* args = static_cast<ErrorDestroy*>(raw);
  if (args->head.struct_size < END_OF(ErrorDestroy, error)) std::abort();
  delete args->error;
  --live_errors;
  return nullptr;
}

Error* DoErrorMessage(void* raw) {
  auto* args = static_cast<ErrorMessage*>(raw);
  if (args->head.struct_size < END_OF(ErrorMessage, message_size)) std::abort();
  args->message = args->error->message.data();
  args->message_size = args->error->message.size();
  return nullptr;
}

Error* DoErrorGetCode(void* raw) {
  auto* args = static_cast<ErrorGetCode*>(raw);
  if (args->head.struct_size < END_OF(ErrorGetCode, code)) std::abort();
  args->code = args->error->code;
  return nullptr;
}

Error* DoErrorForEachPayload(void* raw) {
  return Enter("Error_ForEachPayload", "_Args", raw, END_OF(ErrorForEachPayload, user_arg));
}

std::string Text(const NamedValue& option) {
  switch (option.type) {
    case 0:
      return std::string(option.text, option.value_size);
    case 1:
      return std::to_string(option.number);
    case 2: {
      std::string list;
      for (size_t i = 0; i < option.value_size; ++i)
        list += std::to_string(option.numbers[i]) + ",";
      return list;
    }
    case 3:
      return std::to_string(option.real);
    default:
      return option.flag ? "true" : "false";
  }
}

Error* DoClientCreate(void* raw) {
  auto* args = static_cast<ClientCreate*>(raw);
  if (Error* error =
          Enter("Client_Create", "_Args", raw, END_OF(ClientCreate, kv_try_get_user_arg))) {
    return error;
  }
  std::string text;
  for (size_t i = 0; i < args->num_options; ++i) {
    const NamedValue& option = args->create_options[i];
    text += std::string(option.name, option.name_size) + "=" + Text(option) + ";";
  }
  std::snprintf(options, sizeof(options), "%s", text.c_str());
  args->client = reinterpret_cast<void*>(4000);
  return Leave("Client_Create");
}

Error* DoNumOutputs(void* raw) {
  auto* args = static_cast<NumOutputs*>(raw);
  if (Error* error =
          Enter("Executable_NumOutputs", "_Args", raw, END_OF(NumOutputs, num_outputs))) {
    return error;
  }
  args->num_outputs = reinterpret_cast<size_t>(args->executable);  // as the test wants
  return Leave("Executable_NumOutputs");
}

Error* DoOutputMemoryKinds(void* raw) {
  static const char* const kinds[] = {"device", "pinned_host"};
  static const size_t sizes[] = {6, 11};
  auto* args = static_cast<OutputMemoryKinds*>(raw);
  if (Error* error = Enter("Executable_OutputMemoryKinds", "_Args", raw,
                           END_OF(OutputMemoryKinds, memory_kind_sizes))) {
    return error;
  }
  if (Setting("STUB_KINDS", "") == "none") return NewError("no kinds", kUnimplemented);
  args->num_outputs = 2;
  args->memory_kinds = kinds;
  args->memory_kind_sizes = sizes;
  return Leave("Executable_OutputMemoryKinds");
}

Error* DoPlatformName(void* raw) {
  static const std::string name = Setting("STUB_PLATFORM", "cuda");
  auto* args = static_cast<PlatformName*>(raw);
  if (Error* error =
          Enter("Client_PlatformName", "_Args", raw, END_OF(PlatformName, platform_name_size))) {
    return error;
  }
  args->platform_name = name.data();
  args->platform_name_size = name.size();
  return Leave("Client_PlatformName");
}

size_t OptionsSize() {
  const int minor = Minor();
  if (minor < 78) return END_OF(ExecuteOptions, call_location);
  if (minor < 97) return END_OF(ExecuteOptions, incarnation_ids);
  if (minor < 108) return END_OF(ExecuteOptions, multi_slice_config);
  if (minor < 113) return END_OF(ExecuteOptions, use_major_to_minor_data_layout_for_callbacks);
  if (minor < 116) return END_OF(ExecuteOptions, num_hlo_output_callbacks);
  return END_OF(ExecuteOptions, num_custom_options);
}

Error* DoExecute(void* raw) {
  auto* args = static_cast<Execute*>(raw);
  Error* error = Enter("LoadedExecutable_Execute", "_Args", raw, END_OF(Execute, execute_device));
  if (error != nullptr) return error;
  if (args->options != nullptr) {
    error = Enter("ExecuteOptions", "", args->options, OptionsSize());
    if (error != nullptr) return error;
  }
  if (args->device_complete_events != nullptr) args->device_complete_events[0] = &live_errors;
  return Leave("LoadedExecutable_Execute");
}

Error* DoMemoryStats(void* raw) {
  auto* args = static_cast<MemoryStats*>(raw);
  const bool grown = Minor() >= 113;
  if (Error* error = Enter("Device_MemoryStats", "_Args", raw,
                           grown ? END_OF(MemoryStats, peak_allocated_bytes_is_set)
                                 : END_OF(MemoryStats, peak_pool_bytes_is_set))) {
    return error;
  }
  int64_t next = 1000;
  args->bytes_in_use = next++;
#define SET(field) args->field##_is_set = (args->field = next++) != 0
  SET(peak_bytes_in_use);
  SET(num_allocs);
  SET(largest_alloc_size);
  SET(bytes_limit);
  SET(bytes_reserved);
  SET(peak_bytes_reserved);
  SET(bytes_reservable_limit);
  SET(largest_free_block_bytes);
  SET(pool_bytes);
  SET(peak_pool_bytes);
  if (grown) SET(peak_allocated_bytes);
  return Leave("Device_MemoryStats");
}

Error* DoDeserializeAndLoad(void* raw) {
  auto* args = static_cast<DeserializeAndLoad*>(raw);
  if (Error* error = Enter("Executable_DeserializeAndLoad", "_Args", raw,
                           Minor() >= 111 ? END_OF(DeserializeAndLoad, load_options)
                                          : END_OF(DeserializeAndLoad,
                                                   overridden_serialized_compile_options_size))) {
    return error;
  }
  args->loaded_executable = reinterpret_cast<void*>(3000);
  return Leave("Executable_DeserializeAndLoad");
}

size_t CompiledMemoryStatsSize() {
  const int minor = Minor();
  if (minor < 90) return END_OF(CompiledMemoryStats, peak_memory_in_bytes);
  if (minor < 104) return END_OF(CompiledMemoryStats, total_size_in_bytes);
  return END_OF(CompiledMemoryStats, peak_unpadded_heap_bytes);
}

Error* DoCompiledMemoryStats(void* raw) {
  auto* args = static_cast<CompiledMemoryStats*>(raw);
  const size_t size = CompiledMemoryStatsSize();
  if (Error* error = Enter("Executable_GetCompiledMemoryStats", "_Args", raw, size)) return error;
  int64_t next = 2000;
  args->generated_code_size_in_bytes = next++;
  args->argument_size_in_bytes = next++;
  args->output_size_in_bytes = next++;
  args->alias_size_in_bytes = next++;
  args->temp_size_in_bytes = next++;
  args->host_generated_code_size_in_bytes = next++;
  args->host_argument_size_in_bytes = next++;
  args->host_output_size_in_bytes = next++;
  args->host_alias_size_in_bytes = next++;
  args->host_temp_size_in_bytes = next++;
  args->peak_memory_in_bytes = next++;
  if (size >= END_OF(CompiledMemoryStats, total_size_in_bytes)) args->total_size_in_bytes = next++;
  if (size >= END_OF(CompiledMemoryStats, peak_unpadded_heap_bytes)) {
    args->total_allocation_bytes = next++;
    args->indefinite_allocations = next++;
    args->peak_unpadded_heap_bytes = next++;
  }
  return Leave("Executable_GetCompiledMemoryStats");
}

struct Buffer {
  void* device_memory;
  void (*on_delete)(void* device_memory, void* argument);
  void* argument;
  char ready_event;  // its address is the event
};

Error* DoBufferFromHostBuffer(void* raw) {
  auto* args = static_cast<BufferFromHostBuffer*>(raw);
  if (Error* error = Enter("Client_BufferFromHostBuffer", "_Args", raw,
                           END_OF(BufferFromHostBuffer, buffer))) {
    return error;
  }
  auto* buffer = new Buffer{};
  args->buffer = buffer;
  args->done_with_host_buffer = &buffer->ready_event;
  return Leave("Client_BufferFromHostBuffer");
}

Error* DoCreateView(void* raw) {
  auto* args = static_cast<CreateView*>(raw);
  if (Error* error =
          Enter("Client_CreateViewOfDeviceBuffer", "_Args", raw, END_OF(CreateView, memory))) {
    return error;
  }
  if (Error* error = Leave("Client_CreateViewOfDeviceBuffer")) return error;
  args->buffer = new Buffer{args->device_buffer_ptr, args->on_delete_callback,
                            args->on_delete_callback_arg, 0};
  return nullptr;
}

Error* DoReadyEvent(void* raw) {
  auto* args = static_cast<ReadyEvent*>(raw);
  if (Error* error = Enter("Buffer_ReadyEvent", "_Args", raw, END_OF(ReadyEvent, event))) {
    return error;
  }
  if (Error* error = Leave("Buffer_ReadyEvent")) return error;
  args->event = &static_cast<Buffer*>(args->buffer)->ready_event;
  return nullptr;
}

// A buffer lies one byte behind its own address.
Error* DoUnsafePointer(void* raw) {
  auto* args = static_cast<UnsafePointer*>(raw);
  if (Error* error =
          Enter("Buffer_UnsafePointer", "_Args", raw, END_OF(UnsafePointer, buffer_pointer))) {
    return error;
  }
  args->buffer_pointer = reinterpret_cast<uintptr_t>(args->buffer) + 1;
  return Leave("Buffer_UnsafePointer");
}

Error* DoBufferDestroy(void* raw) {
  auto* buffer = static_cast<Buffer*>(static_cast<BufferDestroy*>(raw)->buffer);
  if (buffer->on_delete != nullptr) buffer->on_delete(buffer->device_memory, buffer->argument);
  delete buffer;
  return nullptr;
}

Error* DoRegisterHandler(void* raw) {
  auto* args = static_cast<RegisterHandler*>(raw);
  if (Error* error = Enter("FFI_Register_Handler", "_Args", raw, END_OF(RegisterHandler, traits))) {
    return error;
  }
  std::snprintf(registered.target, sizeof(registered.target), "%.*s",
                static_cast<int>(args->target_name_size), args->target_name);
  std::snprintf(registered.platform, sizeof(registered.platform), "%.*s",
                static_cast<int>(args->platform_name_size), args->platform_name);
  registered.handler = args->handler;
  registered.traits = args->traits;
  return Leave("FFI_Register_Handler");
}

// Every place of the table has a function of its own, so that a test sees one that is moved.
template <size_t kIndex>
Error* NotInTheStub(void*) {
  std::fprintf(stderr, "function %zu of the stub plugin was called\n", kIndex);
  std::abort();
}

template <size_t... kIndices>
void FillWithAborts(Function** functions, std::index_sequence<kIndices...>) {
  ((functions[kIndices] = NotInTheStub<kIndices>), ...);
}

Extension* Extensions() {
  static FfiExtension ffi;
  static Extension other;
  const std::string kind = Setting("STUB_FFI", "full");
  ffi = {};
  ffi.base.struct_size =
      kind == "short" ? END_OF(FfiExtension, user_data_add) : sizeof(FfiExtension);
  ffi.base.type = 5;
  ffi.register_handler =
      kind == "short" ? reinterpret_cast<Function*>(NotInTheStub<kFunctions>) : DoRegisterHandler;
  other = {sizeof(Extension), 3, kind == "none" ? nullptr : &ffi.base};
  return &other;
}

}  // namespace

extern "C" {

const Seen* stub_seen(const char* function) { return &SeenBy(function); }

const Registered* stub_registered() { return &registered; }

const char* stub_options() { return options; }

int stub_live_errors() { return live_errors; }

const void* GetPjrtApi() {
  static Table table;
  if (Setting("STUB_TABLE", "full") == "none") return nullptr;
  table = {};
  table.struct_size = sizeof(table);
  table.extension_start = Extensions();
  table.version.struct_size = sizeof(table.version);
  table.version.major_version = std::atoi(Setting("STUB_VERSION", "0.117").c_str());
  table.version.minor_version = Minor();
  FillWithAborts(table.functions, std::make_index_sequence<kFunctions>());
  table.functions[0] = DoErrorDestroy;
  table.functions[1] = DoErrorMessage;
  table.functions[2] = DoErrorGetCode;
  table.functions[10] = DoClientCreate;
  table.functions[12] = DoPlatformName;
  table.functions[22] = DoBufferFromHostBuffer;
  table.functions[34] = DoMemoryStats;
  table.functions[44] = DoNumOutputs;
  table.functions[47] = DoOutputMemoryKinds;
  table.functions[55] = DoExecute;
  table.functions[56] = DoDeserializeAndLoad;
  table.functions[58] = DoBufferDestroy;
  table.functions[72] = DoReadyEvent;
  table.functions[73] = DoUnsafePointer;
  table.functions[93] = DoCreateView;
  table.functions[96] = DoCompiledMemoryStats;
  table.functions[132] = DoErrorForEachPayload;
  return &table;
}
}
