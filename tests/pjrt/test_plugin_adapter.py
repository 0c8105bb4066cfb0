"""libflashxla_pjrt.so between a caller of version 0.72 of the PJRT C API and a stub plugin of a newer one."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from flashxla.xla.pjrt_adapter import PLUGIN_VARIABLE, Adapter, PluginError
from tests.pjrt import caller
from tests.pjrt.caller import FreshAdapter, Memory, Stub, Table


class Grown(NamedTuple):
    """An argument struct that is longer in a newer plugin."""

    function: str
    struct: type[caller.Args]
    old: int
    new: int
    outputs: dict[str, int]  # what the stub answers

    def __str__(self) -> str:
        return self.function


GROWN = (
    Grown(
        "Device_MemoryStats",
        caller.MemoryStats,
        185,
        201,
        {"bytes_in_use": 1000}
        | {stat: 1001 + at for at, stat in enumerate(caller._STATS)}
        | {f"{stat}_is_set": 1 for stat in caller._STATS},
    ),
    Grown("Executable_DeserializeAndLoad", caller.DeserializeAndLoad, 64, 72, {"loaded_executable": 3000}),
    Grown(
        "Executable_GetCompiledMemoryStats",
        caller.CompiledMemoryStats,
        112,
        144,
        {name: 2000 + at for at, (name, _) in enumerate(caller.CompiledMemoryStats._fields_[3:])},
    ),
)
OLD_OPTIONS = 80
OPTIONS = {"0.76": 88, "0.78": 112, "0.96": 112, "0.97": 120, "0.108": 121, "0.113": 144, "0.117": 160}
ADAPTED = {
    "Error_Destroy",
    "Error_Message",
    "Error_GetCode",
    "Error_ForEachPayload",
    "Client_Create",
    "Executable_OutputMemoryKinds",
    "Client_PlatformName",
    "Client_BufferFromHostBuffer",
    "LoadedExecutable_Execute",
    *(case.function for case in GROWN),
}
LONGER = 240  # than any struct that the adapter knows


@pytest.fixture
def adapter(fresh: FreshAdapter, stub: Stub) -> Adapter:
    return fresh.load(stub.path)


@pytest.fixture
def table(adapter: Adapter, fresh: FreshAdapter) -> Table:
    return fresh.table()


def first_bytes(seen: caller.Seen, size: int) -> bytes:
    return bytes(seen.bytes[:size])


# Structs that grew


@pytest.mark.parametrize("case", GROWN, ids=str)
def test_the_stub_is_as_strict_as_a_plugin(stub: Stub, case: Grown) -> None:
    table = stub.table()
    error = table.call(case.function, Memory(case.struct))
    expected = f"Unexpected PJRT_{case.function}_Args size: expected {case.new}, got {case.old}"
    assert table.message(error) == expected


@pytest.mark.parametrize("version", ["0.76", "0.90", "0.104", "0.111", "0.117"])
@pytest.mark.parametrize("case", GROWN, ids=str)
def test_an_old_struct_is_passed_on_at_full_length(
    fresh: FreshAdapter, stub: Stub, case: Grown, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_VERSION", version)
    fresh.load(stub.path)
    memory = Memory(case.struct)
    assert memory.size == case.old
    assert fresh.table().call(case.function, memory) is None

    seen = stub.seen(case.function)
    assert seen.calls == 1
    assert seen.size >= case.new
    assert first_bytes(seen, case.old)[8:] == memory.before[8:]
    assert set(first_bytes(seen, seen.size)[case.old :]) == {0}
    assert {name: getattr(memory.args, name) for name in case.outputs} == case.outputs
    assert memory.changed() == set(case.outputs)


@pytest.mark.parametrize("case", GROWN, ids=str)
def test_a_struct_of_the_plugins_size_gets_every_output(table: Table, stub: Stub, case: Grown) -> None:
    memory, direct = Memory(case.struct, case.new), Memory(case.struct, case.new)
    assert table.call(case.function, memory) is None
    assert stub.table().call(case.function, direct) is None
    assert bytes(memory) == bytes(direct)
    assert memory.changed() == set(case.outputs)


@pytest.mark.parametrize("case", GROWN, ids=str)
def test_a_longer_struct_is_passed_on_itself(table: Table, stub: Stub, case: Grown) -> None:
    memory = Memory(case.struct, LONGER)
    assert table.call(case.function, memory) is None
    assert stub.seen(case.function).args == memory.address
    assert memory.changed() == set(case.outputs)


@pytest.mark.parametrize("case", GROWN, ids=str)
def test_an_error_is_the_plugins_own(
    table: Table, stub: Stub, case: Grown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_FAIL", case.function)
    memory = Memory(case.struct)
    error = table.call(case.function, memory)
    assert error is not None
    assert error == stub.seen(case.function).error
    assert {name: getattr(memory.args, name) for name in case.outputs} == case.outputs
    assert memory.changed() == set(case.outputs)
    assert table.message(error) == f"{case.function} was told to fail"
    assert stub.live_errors == 0


# The options of Execute


@pytest.mark.parametrize(("version", "wanted"), OPTIONS.items())
def test_options_of_execute_are_passed_on_at_full_length(
    fresh: FreshAdapter, stub: Stub, version: str, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_VERSION", version)
    options = Memory(caller.ExecuteOptions)
    arguments = {"options": options.address, "device_complete_events": 0}
    assert options.size == OLD_OPTIONS

    direct = stub.table().call("LoadedExecutable_Execute", Memory(caller.Execute, **arguments))
    expected = f"Unexpected PJRT_ExecuteOptions size: expected {wanted}, got {OLD_OPTIONS}"
    assert stub.table().message(direct) == expected

    fresh.load(stub.path)
    memory = Memory(caller.Execute, **arguments)
    assert fresh.table().call("LoadedExecutable_Execute", memory) is None
    seen = stub.seen("ExecuteOptions")
    assert seen.size >= wanted
    assert first_bytes(seen, OLD_OPTIONS)[8:] == options.before[8:]
    assert set(first_bytes(seen, seen.size)[OLD_OPTIONS:]) == {0}
    assert not options.changed()
    assert not memory.changed()  # the options are the caller's own again


def test_other_arguments_of_execute_are_untouched(table: Table, stub: Stub) -> None:
    events = (ctypes.c_void_p * 1)()
    options = Memory(caller.ExecuteOptions)
    memory = Memory(caller.Execute, options=options.address, device_complete_events=ctypes.addressof(events))
    assert table.call("LoadedExecutable_Execute", memory) is None
    seen = stub.seen("LoadedExecutable_Execute")
    passed_on = caller.Execute.from_buffer_copy(seen.bytes)
    assert seen.args == memory.address
    assert passed_on.options == stub.seen("ExecuteOptions").args != options.address
    passed_on.options = options.address
    assert bytes(passed_on) == memory.before
    assert events[0]
    assert not memory.changed()


def test_long_options_of_execute_are_passed_on_themselves(table: Table, stub: Stub) -> None:
    options = Memory(caller.ExecuteOptions, 160)
    memory = Memory(caller.Execute, options=options.address, device_complete_events=0)
    assert table.call("LoadedExecutable_Execute", memory) is None
    assert stub.seen("ExecuteOptions").args == options.address
    assert not options.changed()


def test_execute_without_options(table: Table, stub: Stub) -> None:
    memory = Memory(caller.Execute, options=0, device_complete_events=0)
    assert table.call("LoadedExecutable_Execute", memory) is None
    assert stub.seen("LoadedExecutable_Execute").args == memory.address
    assert stub.seen("ExecuteOptions").calls == 0


def test_an_error_of_execute_is_the_plugins_own(
    table: Table, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_FAIL", "LoadedExecutable_Execute")
    options = Memory(caller.ExecuteOptions)
    memory = Memory(caller.Execute, options=options.address, device_complete_events=0)
    error = table.call("LoadedExecutable_Execute", memory)
    assert error == stub.seen("LoadedExecutable_Execute").error is not None
    assert not memory.changed()
    assert not options.changed()
    assert table.message(error) == "LoadedExecutable_Execute was told to fail"


# Watching the inputs of programs


@pytest.fixture
def execution() -> Memory:
    """Two devices with three inputs each."""
    inputs = [(ctypes.c_void_p * 3)(*(1000 * device + i for i in range(3))) for device in (1, 2)]
    lists = (ctypes.c_void_p * 2)(*map(ctypes.addressof, inputs))
    memory = Memory(
        caller.Execute,
        options=0,
        device_complete_events=0,
        argument_lists=ctypes.addressof(lists),
        num_devices=2,
        num_args=3,
    )
    memory.keep = inputs, lists  # type: ignore[attr-defined]
    return memory


@pytest.mark.parametrize(
    ("fails", "expected"),
    [("", (1001, 1002, 1003, 2001, 2002, 2003)), ("Buffer_UnsafePointer", (0,) * 6)],
    ids=["have", "have_not"],
)
def test_where_inputs_lie(
    fresh: FreshAdapter,
    stub: Stub,
    execution: Memory,
    fails: str,
    expected: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STUB_FAIL", fails)
    adapter = fresh.load(stub.path)
    run = functools.partial(fresh.table().call, "LoadedExecutable_Execute", execution)
    with adapter.watch_inputs() as seen:
        assert run() is None
        assert run() is None
    assert run() is None
    assert seen == [expected] * 2
    assert stub.seen("LoadedExecutable_Execute").calls == 3
    assert stub.live_errors == 0
    assert not execution.changed()


# The table


def test_the_platform_is_gpu(table: Table, stub: Stub) -> None:
    direct, memory = Memory(caller.PlatformName), Memory(caller.PlatformName)
    assert stub.table().call("Client_PlatformName", direct) is None
    assert ctypes.string_at(direct.args.platform_name, direct.args.platform_name_size) == b"cuda"
    assert table.call("Client_PlatformName", memory) is None
    assert ctypes.string_at(memory.args.platform_name, memory.args.platform_name_size) == b"gpu"
    assert stub.seen("Client_PlatformName").args == memory.address


def test_other_platforms_keep_their_names(
    fresh: FreshAdapter, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_PLATFORM", "cpu")
    fresh.load(stub.path)
    memory = Memory(caller.PlatformName)
    assert fresh.table().call("Client_PlatformName", memory) is None
    assert ctypes.string_at(memory.args.platform_name, memory.args.platform_name_size) == b"cpu"


def test_an_error_of_the_platforms_name_is_the_plugins_own(
    table: Table, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_FAIL", "Client_PlatformName")
    error = table.call("Client_PlatformName", Memory(caller.PlatformName))
    assert error == stub.seen("Client_PlatformName").error is not None
    assert table.message(error) == "Client_PlatformName was told to fail"


def test_the_rest_of_the_table_is_the_plugins(table: Table, stub: Stub) -> None:
    plugin = stub.table()
    assert table.address != plugin.address
    assert table.head[:8] == plugin.head[:8]  # the size
    assert table.head[16:] == plugin.head[16:]  # the version
    assert list(table.extensions().items())[1:] == list(plugin.extensions().items())
    assert len(table.functions) == 138
    replaced = {at for at, function in enumerate(table.functions) if function != plugin.functions[at]}
    assert replaced == {caller.FUNCTIONS[name] for name in ADAPTED}


# Loading


@pytest.mark.parametrize("version", ["0.76", "0.117"])
def test_accepted_versions(
    fresh: FreshAdapter, stub: Stub, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_VERSION", version)
    adapter = fresh.load(stub.path)
    assert adapter.api_version == version
    assert adapter.accepted_versions == "0.76 to 0.117"


@pytest.mark.parametrize("version", ["0.75", "0.118", "1.90"])
def test_refused_versions(
    fresh: FreshAdapter, stub: Stub, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_VERSION", version)
    with pytest.raises(PluginError, match=rf"version {version} .*accepted: 0\.76 to 0\.117") as caught:
        fresh.load(stub.path)
    assert str(stub.path) in str(caught.value)
    assert fresh.cdll.flashxla_pjrt_api_version() == -1


def a_text(folder: Path) -> Path:
    path = folder / "text.so"
    path.write_text("no shared object, but long enough to have an ELF header, if it were one. " * 4)
    return path


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (lambda folder: folder / "missing.so", "No such file"),
        (a_text, "invalid ELF header"),
        (lambda folder: "libc.so.6", "no function GetPjrtApi"),
    ],
    ids=["missing", "no library", "no plugin"],
)
def test_what_is_no_plugin(
    fresh: FreshAdapter, stub: Stub, tmp_path: Path, plugin: Callable[[Path], Path | str], message: str
) -> None:
    path = plugin(tmp_path)
    with pytest.raises(PluginError, match=message) as caught:
        fresh.load(path)
    assert str(path) in str(caught.value)
    fresh.load(stub.path)  # another one may follow


def test_a_plugin_without_a_table(fresh: FreshAdapter, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_TABLE", "none")
    with pytest.raises(PluginError, match="GetPjrtApi gives no table"):
        fresh.load(stub.path)


def test_one_plugin_a_process(
    fresh: FreshAdapter, stub: Stub, stub_library: Path, tmp_path: Path, adapter: Adapter
) -> None:
    before = fresh.table()
    fresh.load(stub.path)
    other = Stub(stub_library, tmp_path / "other.so")
    with pytest.raises(PluginError, match=rf"other\.so: the plugin {stub.path} is loaded already"):
        fresh.load(other.path)
    after = fresh.table()
    assert after.address == before.address
    assert after.functions == before.functions


def test_a_framework_loads_the_plugin_of_the_environment(
    fresh: FreshAdapter, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLUGIN_VARIABLE, str(stub.path))
    table = fresh.table()
    assert table.functions[58] == stub.table().functions[58]
    assert fresh.cdll.flashxla_pjrt_api_version() == 117


@pytest.mark.parametrize(
    ("path", "message"),
    [(None, f"{PLUGIN_VARIABLE} does not name a plugin"), ("missing.so", "missing.so: cannot open")],
)
def test_a_framework_without_a_plugin(
    fresh: FreshAdapter,
    path: str | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv(PLUGIN_VARIABLE, raising=False)
    if path is not None:
        monkeypatch.setenv(PLUGIN_VARIABLE, path)
    assert fresh.cdll.GetPjrtApi() is None
    error = capfd.readouterr().err
    assert error.startswith("flashxla: the PJRT plugin can't be used: ")
    assert message in error


# FFI


def test_a_handler_arrives(adapter: Adapter, stub: Stub) -> None:
    adapter.register_ffi({"flashxla_attention": 0x1234})
    assert stub.seen("FFI_Register_Handler").calls == 1
    assert stub.registered.target == b"flashxla_attention"
    assert stub.registered.handler == 0x1234
    assert stub.registered.platform == b"CUDA"
    assert stub.registered.traits == 0


def test_the_plugins_error_of_a_registration(
    adapter: Adapter, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_FAIL", "FFI_Register_Handler")
    with pytest.raises(PluginError, match=r"plugin\.so: target: FFI_Register_Handler was told to fail"):
        adapter.register_ffi({"target": 1})
    assert stub.live_errors == 0


@pytest.mark.parametrize("extension", ["none", "short"])
def test_a_plugin_that_registers_no_handlers(
    fresh: FreshAdapter, stub: Stub, extension: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_FFI", extension)
    with pytest.raises(PluginError, match="no FFI extension"):
        fresh.load(stub.path).register_ffi({"target": 1})


# Views of device memory


HOST, DEVICE_MEMORY, OFFSET = 0x7000, 0x90000, 0x40


class Tensor:
    """A DLPack tensor that counts how often it is deleted."""

    def __init__(self, **fields: int) -> None:
        self.deleted = 0
        self._deleter = caller.DELETER(self._delete)
        deleter = ctypes.cast(self._deleter, ctypes.c_void_p).value
        self.struct = caller.ManagedTensor(
            **{"data": DEVICE_MEMORY, "byte_offset": OFFSET, "deleter": deleter, **fields}
        )

    @property
    def address(self) -> int:
        return ctypes.addressof(self.struct)

    def _delete(self, tensor: int) -> None:
        assert tensor == self.address
        self.deleted += 1


@pytest.fixture
def tensor() -> Tensor:
    return Tensor()


def transfer(data: int = HOST) -> Memory:
    return Memory(caller.BufferFromHostBuffer, data=data)


def test_a_view_is_the_tensors_memory(adapter: Adapter, table: Table, stub: Stub, tensor: Tensor) -> None:
    memory = transfer()
    adapter.provide_view(HOST, tensor.address)
    assert table.call("Client_BufferFromHostBuffer", memory) is None
    assert not adapter.withdraw_view(HOST)
    assert stub.seen("Client_BufferFromHostBuffer").calls == 0
    assert memory.changed() == {"buffer", "done_with_host_buffer"}

    seen = stub.seen("Client_CreateViewOfDeviceBuffer")
    assert seen.size == 112
    view = caller.CreateView.from_buffer_copy(seen.bytes)
    args = memory.args
    assert view.device_buffer_ptr == DEVICE_MEMORY + OFFSET
    assert (view.dims, view.num_dims, view.element_type) == (args.dims, args.num_dims, args.type)
    assert (view.client, view.device, view.memory) == (args.client, args.device, args.memory)
    assert view.layout == args.device_layout
    assert not view.extension_start
    assert not view.stream

    event = Memory(caller.ReadyEvent, buffer=args.buffer)
    assert table.call("Buffer_ReadyEvent", event) is None
    assert args.done_with_host_buffer == event.args.event

    assert tensor.deleted == 0
    table.call("Buffer_Destroy", Memory(caller.BufferDestroy, buffer=args.buffer))
    assert tensor.deleted == 1


def test_a_view_of_a_tensor_without_deleter(adapter: Adapter, table: Table) -> None:
    tensor = Tensor(deleter=0)
    memory = transfer()
    adapter.provide_view(HOST, tensor.address)
    assert table.call("Client_BufferFromHostBuffer", memory) is None
    assert not adapter.withdraw_view(HOST)
    table.call("Buffer_Destroy", Memory(caller.BufferDestroy, buffer=memory.args.buffer))


def test_a_view_serves_one_transfer(adapter: Adapter, table: Table, stub: Stub, tensor: Tensor) -> None:
    adapter.provide_view(HOST, tensor.address)
    for _ in range(2):
        assert table.call("Client_BufferFromHostBuffer", transfer()) is None
    assert stub.seen("Client_CreateViewOfDeviceBuffer").calls == 1
    assert stub.seen("Client_BufferFromHostBuffer").calls == 1


def test_other_transfers_are_the_plugins(adapter: Adapter, table: Table, stub: Stub, tensor: Tensor) -> None:
    memory = transfer(HOST + 8)
    adapter.provide_view(HOST, tensor.address)
    assert table.call("Client_BufferFromHostBuffer", memory) is None
    assert adapter.withdraw_view(HOST)
    seen = stub.seen("Client_BufferFromHostBuffer")
    assert seen.args == memory.address
    assert first_bytes(seen, memory.size) == memory.before
    assert stub.seen("Client_CreateViewOfDeviceBuffer").calls == 0
    assert tensor.deleted == 0  # still the caller's


def test_a_withdrawn_view_is_gone(adapter: Adapter, table: Table, stub: Stub, tensor: Tensor) -> None:
    adapter.provide_view(HOST, tensor.address)
    assert adapter.withdraw_view(HOST)
    assert not adapter.withdraw_view(HOST)
    assert table.call("Client_BufferFromHostBuffer", transfer()) is None
    assert stub.seen("Client_CreateViewOfDeviceBuffer").calls == 0
    assert stub.seen("Client_BufferFromHostBuffer").calls == 1
    assert tensor.deleted == 0


def test_views_wait_for_their_own_transfers(adapter: Adapter, table: Table, stub: Stub) -> None:
    tensors = {HOST + at: Tensor(data=DEVICE_MEMORY + at, byte_offset=0) for at in (0, 64, 128)}
    for host, tensor in tensors.items():
        adapter.provide_view(host, tensor.address)
    for host in reversed(tensors):
        assert table.call("Client_BufferFromHostBuffer", transfer(host)) is None
        view = caller.CreateView.from_buffer_copy(stub.seen("Client_CreateViewOfDeviceBuffer").bytes)
        assert view.device_buffer_ptr == tensors[host].struct.data


@pytest.mark.parametrize("function", ("Client_CreateViewOfDeviceBuffer", "Buffer_ReadyEvent"))
def test_a_view_that_fails_deletes_the_tensor(
    adapter: Adapter,
    table: Table,
    stub: Stub,
    tensor: Tensor,
    function: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The caller gets an error and no buffer, so that nothing else would."""
    monkeypatch.setenv("STUB_FAIL", function)
    adapter.provide_view(HOST, tensor.address)
    error = table.call("Client_BufferFromHostBuffer", transfer())
    assert error == stub.seen(function).error is not None
    assert table.message(error) == f"{function} was told to fail"
    assert tensor.deleted == 1
    assert stub.live_errors == 0
