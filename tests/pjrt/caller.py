"""What a framework made with version 0.72 of the PJRT C API does, as PyTorch/XLA 2.9 is: its structs and calls.

Written from the API's definition, independent of csrc/pjrt, and so is what reads the stub plugin.
"""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path
from typing import Any, TypeVar

from flashxla.xla import pjrt_adapter

# Bytes behind a caller's struct, which nobody may write, and nobody may take for a field.
CANARY = b"\xa5" * 96
TABLE_HEAD = 40  # bytes before the functions of a plugin's table

FUNCTIONS = {
    "Error_Destroy": 0,
    "Error_Message": 1,
    "Error_GetCode": 2,
    "Client_Create": 10,
    "Client_PlatformName": 12,
    "Client_BufferFromHostBuffer": 22,
    "Device_MemoryStats": 34,
    "Executable_OutputMemoryKinds": 47,
    "LoadedExecutable_Execute": 55,
    "Executable_DeserializeAndLoad": 56,
    "Buffer_Destroy": 58,
    "Buffer_ReadyEvent": 72,
    "Executable_GetCompiledMemoryStats": 96,
    "Error_ForEachPayload": 132,
}

_Fields = list[tuple[str, Any]]


def _pointers(*names: str) -> _Fields:
    return [(name, ctypes.c_void_p) for name in names]


def _sizes(*names: str) -> _Fields:
    return [(name, ctypes.c_size_t) for name in names]


def _numbers(*names: str) -> _Fields:
    return [(name, ctypes.c_int64) for name in names]


_HEAD = _sizes("struct_size") + _pointers("extension_start")


class Args(ctypes.Structure):
    """An argument struct of the caller."""


class ErrorDestroy(Args):
    _fields_ = _HEAD + _pointers("error")


class ErrorMessage(Args):
    _fields_ = _HEAD + _pointers("error", "message") + _sizes("message_size")


class ErrorGetCode(Args):
    _fields_ = _HEAD + _pointers("error") + [("code", ctypes.c_int)]


class ErrorForEachPayload(Args):
    _fields_ = _HEAD + _pointers("error", "visitor", "user_arg")


class NamedValue(ctypes.Structure):
    """An option of a client, a number."""

    _fields_ = (
        *_HEAD,
        *_pointers("name"),
        *_sizes("name_size"),
        ("type", ctypes.c_int),
        *_numbers("value"),
        *_sizes("value_size"),
    )


class ClientCreate(Args):
    _fields_ = (
        _HEAD
        + _pointers("create_options")
        + _sizes("num_options")
        + _pointers("kv_get_callback", "kv_get_user_arg", "kv_put_callback", "kv_put_user_arg", "client")
        + _pointers("kv_try_get_callback", "kv_try_get_user_arg")
    )


class OutputMemoryKinds(Args):
    _fields_ = (
        _HEAD
        + _pointers("executable")
        + _sizes("num_outputs")
        + _pointers("memory_kinds", "memory_kind_sizes")
    )


class ChipCount(Args):
    _fields_ = _sizes("struct_size") + _pointers("topology") + [("chip_count", ctypes.c_int32)]


class PlatformName(Args):
    _fields_ = _HEAD + _pointers("client", "platform_name") + _sizes("platform_name_size")


class BufferFromHostBuffer(Args):
    _fields_ = (
        _HEAD
        + _pointers("client", "data")
        + [("type", ctypes.c_int)]
        + _pointers("dims")
        + _sizes("num_dims")
        + _pointers("byte_strides")
        + _sizes("num_byte_strides")
        + [("host_buffer_semantics", ctypes.c_int)]
        + _pointers("device", "memory", "device_layout", "done_with_host_buffer", "buffer")
    )


class CreateView(Args):
    """What the adapter makes, and the test reads."""

    _fields_ = (
        _HEAD
        + _pointers("client", "device_buffer_ptr", "dims")
        + _sizes("num_dims")
        + [("element_type", ctypes.c_int)]
        + _pointers("layout", "device", "on_delete_callback", "on_delete_callback_arg", "stream", "buffer")
        + _pointers("memory")
    )


class BufferDestroy(Args):
    _fields_ = _HEAD + _pointers("buffer")


class ReadyEvent(Args):
    _fields_ = _HEAD + _pointers("buffer", "event")


class ExecuteOptions(Args):
    _fields_ = (
        _HEAD
        + _pointers("send_callbacks", "recv_callbacks")
        + _sizes("num_send_ops", "num_recv_ops")
        + [("launch_id", ctypes.c_int)]
        + _pointers("non_donatable_input_indices")
        + _sizes("num_non_donatable_input_indices")
        + _pointers("context")
    )


class Execute(Args):
    _fields_ = (
        _HEAD
        + _pointers("executable", "options", "argument_lists")
        + _sizes("num_devices", "num_args")
        + _pointers("output_lists", "device_complete_events", "execute_device")
    )


_STATS = (
    "peak_bytes_in_use",
    "num_allocs",
    "largest_alloc_size",
    "bytes_limit",
    "bytes_reserved",
    "peak_bytes_reserved",
    "bytes_reservable_limit",
    "largest_free_block_bytes",
    "pool_bytes",
    "peak_pool_bytes",
)


class MemoryStats(Args):
    _fields_ = (
        _HEAD
        + _pointers("device")
        + _numbers("bytes_in_use")
        + [field for stat in _STATS for field in (*_numbers(stat), (f"{stat}_is_set", ctypes.c_uint8))]
    )


class DeserializeAndLoad(Args):
    _fields_ = (
        _HEAD
        + _pointers("client", "serialized_executable")
        + _sizes("serialized_executable_size")
        + _pointers("loaded_executable", "overridden_serialized_compile_options")
        + _sizes("overridden_serialized_compile_options_size")
    )


class CompiledMemoryStats(Args):
    _fields_ = (
        _HEAD
        + _pointers("executable")
        + _numbers(
            "generated_code_size_in_bytes",
            "argument_size_in_bytes",
            "output_size_in_bytes",
            "alias_size_in_bytes",
            "temp_size_in_bytes",
            "host_generated_code_size_in_bytes",
            "host_argument_size_in_bytes",
            "host_output_size_in_bytes",
            "host_alias_size_in_bytes",
            "host_temp_size_in_bytes",
            "peak_memory_in_bytes",
        )
    )


class ManagedTensor(ctypes.Structure):
    """DLPack's DLManagedTensor."""

    _fields_ = (
        *_pointers("data"),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        *_pointers("shape", "strides"),
        ("byte_offset", ctypes.c_uint64),
        *_pointers("manager_ctx", "deleter"),
    )


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_NEW, _USED = b"dltensor", b"used_dltensor"


def take(capsule: Any) -> ManagedTensor:
    """The tensor in a capsule, which is then the caller's to delete."""
    get, rename = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_SetName
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    rename.argtypes = (ctypes.py_object, ctypes.c_char_p)
    tensor = ManagedTensor.from_address(get(capsule, _NEW))
    rename(capsule, _USED)
    return tensor


def size_of(struct: type[Args]) -> int:
    """The size that the API states: the end of the last field, without padding behind it."""
    last = getattr(struct, struct._fields_[-1][0])
    return last.offset + last.size


_Some = TypeVar("_Some", bound=Args)


class Memory:
    """A caller's struct of `size` bytes, each input field with a value of its own, and the canary behind it."""

    def __init__(self, struct: type[_Some], size: int = 0, /, **fields: int) -> None:
        self.size = size or size_of(struct)
        self._bytes = bytearray(bytes(1 + at % 250 for at in range(self.size)) + CANARY)
        self.args: Any = struct.from_buffer(self._bytes)
        heads = {"struct_size": self.size, "extension_start": 0}
        known = {name for name, _ in self.args._fields_}
        for name, value in {**{n: v for n, v in heads.items() if n in known}, **fields}.items():
            setattr(self.args, name, value)
        self.before = bytes(self)

    def __bytes__(self) -> bytes:
        return bytes(self._bytes[: self.size])

    @property
    def address(self) -> int:
        return ctypes.addressof(self.args)

    def changed(self) -> set[str]:
        """The fields that have another value than at first. Fails if anything behind the struct has."""
        assert self._bytes[self.size :] == CANARY
        first = type(self.args).from_buffer_copy(self.before + CANARY)
        return {name for name, _ in self.args._fields_ if getattr(first, name) != getattr(self.args, name)}


class Seen(ctypes.Structure):
    """The latest call of one of the stub's functions."""

    _fields_ = (
        *_numbers("calls"),
        *_pointers("args"),
        *_sizes("size"),
        *_pointers("error"),
        ("bytes", ctypes.c_uint8 * 256),
    )


class Registered(ctypes.Structure):
    """The latest FFI registration with the stub."""

    _fields_ = (
        ("target", ctypes.c_char * 64),
        ("platform", ctypes.c_char * 64),
        ("handler", ctypes.c_void_p),
        ("traits", ctypes.c_int),
    )


class Stub:
    """A copy of the stub plugin, which the adapter under test loads too."""

    def __init__(self, library: Path, path: Path) -> None:
        shutil.copyfile(library, path)
        self.path = path
        self._cdll = ctypes.CDLL(str(path))
        self._cdll.stub_seen.restype = ctypes.POINTER(Seen)
        self._cdll.stub_registered.restype = ctypes.POINTER(Registered)
        self._cdll.stub_options.restype = ctypes.c_char_p
        self._cdll.GetPjrtApi.restype = ctypes.c_void_p

    def table(self) -> Table:
        return Table(self._cdll.GetPjrtApi())

    def seen(self, function: str) -> Seen:
        return self._cdll.stub_seen(function.encode()).contents

    @property
    def registered(self) -> Registered:
        return self._cdll.stub_registered().contents

    @property
    def options(self) -> str:
        """Those of the latest client."""
        return self._cdll.stub_options().decode()

    @property
    def live_errors(self) -> int:
        """Errors that nobody has destroyed."""
        return self._cdll.stub_live_errors()


class Table:
    """A plugin's table of functions."""

    def __init__(self, address: int) -> None:
        self.address = address
        self.size = ctypes.c_size_t.from_address(address).value
        self.head = ctypes.string_at(address, TABLE_HEAD)
        count = (self.size - TABLE_HEAD) // 8
        self.functions = list((ctypes.c_void_p * count).from_address(address + TABLE_HEAD))

    def extensions(self) -> dict[int, int]:
        """The addresses of the extensions, by type, in the table's order."""
        found = {}
        address = ctypes.c_void_p.from_address(self.address + 8).value
        while address:
            found[ctypes.c_int.from_address(address + 8).value] = address
            address = ctypes.c_void_p.from_address(address + 16).value
        return found

    def call(self, function: str, memory: Memory) -> int | None:
        """The PJRT_Error that the function returns, by address."""
        return self.call_at(function, memory.address)

    def call_at(self, function: str, args: int) -> int | None:
        """The same for an argument struct anywhere."""
        prototype = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
        return prototype(self.functions[FUNCTIONS[function]])(args)

    def message(self, error: int | None) -> str:
        """The text of an error, which is destroyed."""
        memory = Memory(ErrorMessage, error=error or 0)
        self.call("Error_Message", memory)
        text = ctypes.string_at(memory.args.message, memory.args.message_size).decode()
        self.call("Error_Destroy", Memory(ErrorDestroy, error=error or 0))
        return text


class FreshAdapter:
    """A copy of the adapter: a library keeps the plugin that it loads as long as the process lives."""

    def __init__(self, library: Path, path: Path) -> None:
        shutil.copyfile(library, path)
        self.path = path
        self.cdll = ctypes.CDLL(str(path))
        self.cdll.GetPjrtApi.restype = ctypes.c_void_p

    def load(self, plugin: Path | str) -> pjrt_adapter.Adapter:
        """As flashxla itself does it. Raises PluginError."""
        return pjrt_adapter.Adapter(self.path, Path(plugin))

    def table(self) -> Table:
        return Table(self.cdll.GetPjrtApi())
