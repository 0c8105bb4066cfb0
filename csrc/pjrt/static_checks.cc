// Checks the structs against the sizes that version 0.117 of the PJRT C API states (X_STRUCT_SIZE:
// the end of the last field).
#include "pjrt/pjrt_abi.h"

namespace flashxla::pjrt {

#define FLASHXLA_ENDS_AT(type, last, size) \
  static_assert(offsetof(type, last) + sizeof(type::last) == (size))

FLASHXLA_ENDS_AT(Extension, next, 24);
FLASHXLA_ENDS_AT(ApiVersion, minor_version, 24);
static_assert(sizeof(Api) == 40);
FLASHXLA_ENDS_AT(ErrorDestroyArgs, error, 24);
FLASHXLA_ENDS_AT(ErrorMessageArgs, message_size, 40);
FLASHXLA_ENDS_AT(ErrorGetCodeArgs, code, 28);
FLASHXLA_ENDS_AT(ErrorForEachPayloadArgs, user_arg, 40);
FLASHXLA_ENDS_AT(PluginInitializeArgs, extension_start, 16);
FLASHXLA_ENDS_AT(EventDestroyArgs, event, 24);
FLASHXLA_ENDS_AT(EventAwaitArgs, event, 24);
FLASHXLA_ENDS_AT(NamedValue, value_size, 56);
FLASHXLA_ENDS_AT(ClientCreateArgs, kv_try_get_user_arg, 88);
FLASHXLA_ENDS_AT(ClientDestroyArgs, client, 24);
FLASHXLA_ENDS_AT(ClientAddressableDevicesArgs, num_addressable_devices, 40);
FLASHXLA_ENDS_AT(Program, format_size, 48);
FLASHXLA_ENDS_AT(ClientCompileArgs, executable, 56);
FLASHXLA_ENDS_AT(BufferToHostBufferArgs, event, 56);
FLASHXLA_ENDS_AT(LoadedExecutableDestroyArgs, executable, 24);
FLASHXLA_ENDS_AT(ExecutableNumOutputsArgs, num_outputs, 32);
FLASHXLA_ENDS_AT(ExecutableOutputMemoryKindsArgs, memory_kind_sizes, 48);
FLASHXLA_ENDS_AT(TpuTopologyChipCountArgs, chip_count, 20);
FLASHXLA_ENDS_AT(TpuTopologyExtension, functions, 272);
FLASHXLA_ENDS_AT(ClientPlatformNameArgs, platform_name_size, 40);
FLASHXLA_ENDS_AT(ClientBufferFromHostBufferArgs, buffer, 120);
FLASHXLA_ENDS_AT(ClientCreateViewOfDeviceBufferArgs, memory, 112);
FLASHXLA_ENDS_AT(BufferDestroyArgs, buffer, 24);
FLASHXLA_ENDS_AT(BufferReadyEventArgs, event, 32);
FLASHXLA_ENDS_AT(BufferUnsafePointerArgs, buffer_pointer, 32);
FLASHXLA_ENDS_AT(ExecuteOptions, num_custom_options, 160);
FLASHXLA_ENDS_AT(LoadedExecutableExecuteArgs, execute_device, 80);
FLASHXLA_ENDS_AT(ExecutableDeserializeAndLoadArgs, load_options, 72);
FLASHXLA_ENDS_AT(ExecutableGetCompiledMemoryStatsArgs, more_stats, 144);
FLASHXLA_ENDS_AT(FfiExtension, register_handler, 48);
FLASHXLA_ENDS_AT(FfiRegisterHandlerArgs, traits, 52);
static_assert(offsetof(DeviceMemoryStatsArgs, peak_allocated_bytes) + 9 == 201);

}  // namespace flashxla::pjrt
