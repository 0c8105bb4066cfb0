// The part of the PJRT C API that the adapter and examples/run_without_python use, in the layout of
// versions 0.76 to 0.117.
//
// The API's own definition is xla/pjrt/c/pjrt_c_api.h of openxla/xla: a struct only ever grows at
// its end, and its first field is the size that the caller knows. Each struct here is the longest
// of those versions. Fields have the API's names. `scripts/pjrt_structs.py` compares the
// layouts with each version's definitions.
#ifndef FLASHXLA_CSRC_PJRT_PJRT_ABI_H_
#define FLASHXLA_CSRC_PJRT_PJRT_ABI_H_

#include <cstddef>
#include <cstdint>

namespace flashxla::pjrt {

inline constexpr int kMajor = 0;
inline constexpr int kOldestMinor = 76;
inline constexpr int kNewestMinor = 117;

struct Error;
struct Client;
struct Device;
struct Memory;
struct Buffer;
struct Event;
struct Executable;
struct LoadedExecutable;

struct Extension {
  size_t struct_size;
  int32_t type;
  Extension* next;
};

struct ApiVersion {
  size_t struct_size;
  Extension* extension_start;
  int32_t major_version;
  int32_t minor_version;
};

using Function = Error*(void* args);

// The table of a plugin: this and then its functions, as many as struct_size says.
struct Api {
  size_t struct_size;
  Extension* extension_start;
  ApiVersion pjrt_api_version;
};

// Indices of functions in the table, which have not changed since version 0.57.
enum FunctionIndex : size_t {
  kErrorDestroy = 0,
  kErrorMessage = 1,
  kErrorGetCode = 2,
  kPluginInitialize = 3,
  kEventDestroy = 5,
  kEventAwait = 8,
  kClientCreate = 10,
  kClientDestroy = 11,
  kClientPlatformName = 12,
  kClientAddressableDevices = 16,
  kClientCompile = 20,
  kClientBufferFromHostBuffer = 22,
  kDeviceMemoryStats = 34,
  kExecutableNumOutputs = 44,
  kExecutableOutputMemoryKinds = 47,
  kLoadedExecutableDestroy = 50,
  kLoadedExecutableExecute = 55,
  kExecutableDeserializeAndLoad = 56,
  kBufferDestroy = 58,
  kBufferToHostBuffer = 70,
  kBufferReadyEvent = 72,
  kBufferUnsafePointer = 73,
  kClientCreateViewOfDeviceBuffer = 93,
  kExecutableGetCompiledMemoryStats = 96,
  kNumFunctions,               // a table must have at least this many
  kErrorForEachPayload = 132,  // by 0.113
};

struct ErrorDestroyArgs {
  size_t struct_size;
  Extension* extension_start;
  Error* error;
};

struct ErrorMessageArgs {
  size_t struct_size;
  Extension* extension_start;
  const Error* error;
  const char* message;
  size_t message_size;
};

inline constexpr int32_t kUnimplementedCode = 12;

struct ErrorGetCodeArgs {
  size_t struct_size;
  Extension* extension_start;
  const Error* error;
  int32_t code;
};

struct ErrorForEachPayloadArgs {
  size_t struct_size;
  Extension* extension_start;
  const Error* error;
  void* visitor;
  void* user_arg;
};

struct PluginInitializeArgs {
  size_t struct_size;
  Extension* extension_start;
};

struct EventDestroyArgs {
  size_t struct_size;
  Extension* extension_start;
  Event* event;
};

struct EventAwaitArgs {
  size_t struct_size;
  Extension* extension_start;
  Event* event;
};

enum NamedValueType : int32_t {
  kStringValue = 0,
  kInt64Value = 1,
  kInt64ListValue = 2,
  kFloatValue = 3,
  kBoolValue = 4,
};

struct NamedValue {
  size_t struct_size;
  Extension* extension_start;
  const char* name;
  size_t name_size;
  int32_t type;
  union {
    const char* string_value;
    int64_t int64_value;
    const int64_t* int64_array_value;
    float float_value;
    bool bool_value;
  };
  size_t value_size;
};

struct ClientCreateArgs {
  size_t struct_size;
  Extension* extension_start;
  const NamedValue* create_options;
  size_t num_options;
  void* kv_get_callback;
  void* kv_get_user_arg;
  void* kv_put_callback;
  void* kv_put_user_arg;
  Client* client;
  void* kv_try_get_callback;
  void* kv_try_get_user_arg;
};

struct ClientDestroyArgs {
  size_t struct_size;
  Extension* extension_start;
  Client* client;
};

struct ClientPlatformNameArgs {
  size_t struct_size;
  Extension* extension_start;
  Client* client;
  const char* platform_name;
  size_t platform_name_size;
};

struct ClientAddressableDevicesArgs {
  size_t struct_size;
  Extension* extension_start;
  Client* client;
  Device* const* addressable_devices;
  size_t num_addressable_devices;
};

struct Program {
  size_t struct_size;
  Extension* extension_start;
  const char* code;
  size_t code_size;
  const char* format;
  size_t format_size;
};

struct ClientCompileArgs {
  size_t struct_size;
  Extension* extension_start;
  Client* client;
  const Program* program;
  const char* compile_options;
  size_t compile_options_size;
  LoadedExecutable* executable;
};

// Names are those of dtypes in safetensors files.
enum BufferType : int32_t {
  kBufferBool = 1,
  kBufferI8 = 2,
  kBufferI16 = 3,
  kBufferI32 = 4,
  kBufferI64 = 5,
  kBufferU8 = 6,
  kBufferF16 = 10,
  kBufferF32 = 11,
  kBufferF64 = 12,
  kBufferBF16 = 13,
  kBufferF8E5M2 = 16,
  kBufferF8E4M3 = 17,
};

// The memory stays as it is until the event `done_with_host_buffer`.
inline constexpr int32_t kImmutableUntilTransferCompletes = 1;

struct ClientBufferFromHostBufferArgs {
  size_t struct_size;
  Extension* extension_start;
  Client* client;
  const void* data;
  int32_t type;
  const int64_t* dims;
  size_t num_dims;
  const int64_t* byte_strides;
  size_t num_byte_strides;
  int32_t host_buffer_semantics;
  Device* device;
  Memory* memory;
  void* device_layout;
  Event* done_with_host_buffer;
  Buffer* buffer;
};

struct ClientCreateViewOfDeviceBufferArgs {
  size_t struct_size;
  Extension* extension_start;
  Client* client;
  void* device_buffer_ptr;
  const int64_t* dims;
  size_t num_dims;
  int32_t element_type;
  void* layout;
  Device* device;
  void (*on_delete_callback)(void* device_buffer_ptr, void* user_arg);
  void* on_delete_callback_arg;
  intptr_t stream;
  Buffer* buffer;
  Memory* memory;
};

struct BufferDestroyArgs {
  size_t struct_size;
  Extension* extension_start;
  Buffer* buffer;
};

struct BufferToHostBufferArgs {
  size_t struct_size;
  Extension* extension_start;
  Buffer* src;
  void* host_layout;
  void* dst;
  size_t dst_size;
  Event* event;
};

struct BufferReadyEventArgs {
  size_t struct_size;
  Extension* extension_start;
  Buffer* buffer;
  Event* event;
};

struct BufferUnsafePointerArgs {
  size_t struct_size;
  Extension* extension_start;
  Buffer* buffer;
  uintptr_t buffer_pointer;
};

struct LoadedExecutableDestroyArgs {
  size_t struct_size;
  Extension* extension_start;
  LoadedExecutable* executable;
};

struct ExecutableNumOutputsArgs {
  size_t struct_size;
  Extension* extension_start;
  Executable* executable;
  size_t num_outputs;
};

struct ExecutableOutputMemoryKindsArgs {
  size_t struct_size;
  Extension* extension_start;
  Executable* executable;
  size_t num_outputs;
  const char* const* memory_kinds;
  const size_t* memory_kind_sizes;
};

// Structs that have grown. Comments give the version that added a field.

struct ExecuteOptions {
  size_t struct_size;
  Extension* extension_start;
  void* send_callbacks;
  void* recv_callbacks;
  size_t num_send_ops;
  size_t num_recv_ops;
  int32_t launch_id;
  const int64_t* non_donatable_input_indices;
  size_t num_non_donatable_input_indices;
  void* context;
  const char* call_location;  // 0.76
  size_t num_tasks;           // 0.78
  int32_t* task_ids;
  int64_t* incarnation_ids;
  void* multi_slice_config;                           // 0.97
  bool use_major_to_minor_data_layout_for_callbacks;  // 0.108
  void* hlo_output_callbacks;                         // by 0.113
  size_t num_hlo_output_callbacks;
  const void* custom_options;  // 0.116
  size_t num_custom_options;
};

struct LoadedExecutableExecuteArgs {
  size_t struct_size;
  Extension* extension_start;
  LoadedExecutable* executable;
  ExecuteOptions* options;
  Buffer* const* const* argument_lists;
  size_t num_devices;
  size_t num_args;
  void* output_lists;
  Event** device_complete_events;
  Device* execute_device;
};

struct DeviceMemoryStatsArgs {
  struct Stat {
    int64_t value;
    bool is_set;
  };
  size_t struct_size;
  Extension* extension_start;
  Device* device;
  int64_t bytes_in_use;
  Stat stats[10];
  Stat peak_allocated_bytes;  // by 0.113
};

struct ExecutableDeserializeAndLoadArgs {
  size_t struct_size;
  Extension* extension_start;
  Client* client;
  const char* serialized_executable;
  size_t serialized_executable_size;
  LoadedExecutable* loaded_executable;
  const char* overridden_serialized_compile_options;
  size_t overridden_serialized_compile_options_size;
  void* load_options;  // 0.111
};

struct ExecutableGetCompiledMemoryStatsArgs {
  size_t struct_size;
  Extension* extension_start;
  Executable* executable;
  int64_t stats[11];
  int64_t total_size_in_bytes;  // 0.90
  int64_t more_stats[3];        // 0.104
};

// The FFI extension: registers custom call handlers with the runtime that the plugin holds.

inline constexpr int32_t kFfiExtension = 5;

struct FfiRegisterHandlerArgs {
  size_t struct_size;
  const char* target_name;
  size_t target_name_size;
  void* handler;
  const char* platform_name;
  size_t platform_name_size;
  uint32_t traits;
};

struct FfiExtension {
  Extension base;
  void* type_register;
  void* user_data_add;
  Error* (*register_handler)(FfiRegisterHandlerArgs* args);
};

// The extension by which a framework asks for the topology of TPUs.

inline constexpr int32_t kTpuTopologyExtension = 16;
inline constexpr size_t kNumTpuTopologyFunctions = 31;
inline constexpr size_t kTpuTopologyChipCount = 10;

struct TopologyDescription;

struct TpuTopologyChipCountArgs {
  size_t struct_size;
  const TopologyDescription* topology;
  int32_t chip_count;
};

struct TpuTopologyExtension {
  Extension base;
  Function* functions[kNumTpuTopologyFunctions];
};

}  // namespace flashxla::pjrt

#endif  // FLASHXLA_CSRC_PJRT_PJRT_ABI_H_
