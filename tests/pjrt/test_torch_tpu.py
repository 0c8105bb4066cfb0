"""What TorchTPU asks of a plugin and only a TPU's has, as libflashxla_pjrt.so answers it for a stub plugin."""

from __future__ import annotations

import ctypes

import pytest

from tests.pjrt import caller
from tests.pjrt.caller import FreshAdapter, Memory, Stub, Table

TPU_TOPOLOGY, CHIP_COUNT, FUNCTIONS = 16, 10, 31
UNIMPLEMENTED, INTERNAL = 12, 13


@pytest.fixture
def table(fresh: FreshAdapter, stub: Stub) -> Table:
    fresh.load(stub.path)
    return fresh.table()


class Options:
    """An array of options, and the texts that it points to."""

    def __init__(self, **values: int) -> None:
        self._names = [ctypes.create_string_buffer(name.encode()) for name in values]
        self._array = (caller.NamedValue * len(values))()
        for option, name, (text, value) in zip(self._array, self._names, values.items(), strict=True):
            option.name, option.name_size = ctypes.addressof(name), len(text)
            option.type, option.value, option.value_size = 1, value, 1

    @property
    def address(self) -> int:
        return ctypes.addressof(self._array)


@pytest.mark.parametrize(
    ("asked", "passed_on"),
    [
        ({}, ""),
        ({"premapped_buffer_size": 7}, ""),
        ({"memory_fraction": 1, "premapped_buffer_size": 7, "node_id": 2}, "memory_fraction=1;node_id=2;"),
        ({"premapped_buffer_sizes": 7, "premapped": 8}, "premapped_buffer_sizes=7;premapped=8;"),
    ],
)
def test_options_of_tpus_are_dropped(table: Table, stub: Stub, asked: dict[str, int], passed_on: str) -> None:
    given = Options(**asked)
    address = given.address if asked else 0
    memory = Memory(caller.ClientCreate, create_options=address, num_options=len(asked))
    assert table.call("Client_Create", memory) is None
    assert stub.options == passed_on
    assert memory.args.client == 4000
    assert memory.changed() == {"client"}


def test_options_of_flashxla_are_added(fresh: FreshAdapter, stub: Stub) -> None:
    """Of every type; one that the framework has is replaced."""
    adapter = fresh.load(stub.path)
    adapter.set_options(
        {"platform_name": "cuda", "node_id": 5, "visible_devices": [2, 0], "memory_fraction": 0.5}
        | {"preallocate": False, "nothing": []}
    )
    adapter.set_options({"preallocate": True})
    given = Options(premapped_buffer_size=7, other=8, node_id=1)
    memory = Memory(caller.ClientCreate, create_options=given.address, num_options=3)
    assert fresh.table().call("Client_Create", memory) is None
    assert stub.options == (
        "other=8;memory_fraction=0.500000;node_id=5;nothing=;platform_name=cuda;preallocate=true;visible_devices=2,0,;"
    )
    assert memory.changed() == {"client"}


def test_options_of_an_unknown_type(fresh: FreshAdapter, stub: Stub) -> None:
    with pytest.raises(TypeError, match="allocator: got None"):
        fresh.load(stub.path).set_options({"allocator": None})


def test_an_error_of_a_client_is_the_plugins_own(
    table: Table, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_FAIL", "Client_Create")
    given = Options(premapped_buffer_size=1)
    memory = Memory(caller.ClientCreate, create_options=given.address, num_options=1)
    error = table.call("Client_Create", memory)
    assert error == stub.seen("Client_Create").error is not None
    assert memory.args.create_options == given.address
    assert table.message(error) == "Client_Create was told to fail"
    assert stub.live_errors == 0


def kinds(table: Table, count: int) -> list[bytes]:
    """The kinds of an executable with so many outputs."""
    memory = Memory(caller.OutputMemoryKinds, executable=count)
    assert table.call("Executable_OutputMemoryKinds", memory) is None
    total = memory.args.num_outputs
    names = (ctypes.c_void_p * total).from_address(memory.args.memory_kinds)
    sizes = (ctypes.c_size_t * total).from_address(memory.args.memory_kind_sizes)
    return [ctypes.string_at(name, size) for name, size in zip(names, sizes, strict=True)]


def test_memory_kinds_are_the_plugins(table: Table, stub: Stub) -> None:
    assert kinds(table, 5) == [b"device", b"pinned_host"]
    assert stub.seen("Executable_NumOutputs").calls == 0


@pytest.mark.parametrize("counts", [[0], [3], [1, 64, 65, 2, 1000]])
def test_memory_kinds_of_a_plugin_without_them(
    table: Table, stub: Stub, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_KINDS", "none")
    for count in counts:
        assert kinds(table, count) == [b"device"] * count
    assert stub.live_errors == 0


@pytest.mark.parametrize("function", ["Executable_OutputMemoryKinds", "Executable_NumOutputs"])
def test_other_errors_of_memory_kinds_are_the_plugins_own(
    table: Table, stub: Stub, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_FAIL", function)
    if function == "Executable_NumOutputs":
        monkeypatch.setenv("STUB_KINDS", "none")
    error = table.call("Executable_OutputMemoryKinds", Memory(caller.OutputMemoryKinds, executable=2))
    assert table.message(error) == f"{function} was told to fail"
    assert stub.live_errors == 0


def topology(table: Table, index: int, memory: Memory) -> int | None:
    """The error of a function of the extension."""
    address = table.extensions()[TPU_TOPOLOGY] + 24 + 8 * index
    function = ctypes.c_void_p.from_address(address).value
    return ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(function)(memory.address)


def test_there_is_one_chip(table: Table, stub: Stub) -> None:
    assert TPU_TOPOLOGY not in stub.table().extensions()
    assert next(iter(table.extensions())) == TPU_TOPOLOGY
    size = ctypes.c_size_t.from_address(table.extensions()[TPU_TOPOLOGY]).value
    assert size == 24 + 8 * FUNCTIONS
    memory = Memory(caller.ChipCount)
    assert topology(table, CHIP_COUNT, memory) is None
    assert memory.args.chip_count == 1
    assert memory.changed() <= {"chip_count"}


@pytest.mark.parametrize("index", sorted(set(range(FUNCTIONS)) - {CHIP_COUNT}))
def test_the_rest_of_a_topology_is_an_error(table: Table, stub: Stub, index: int) -> None:
    memory = Memory(caller.ChipCount)
    error = topology(table, index, memory)
    code = Memory(caller.ErrorGetCode, error=error)
    assert table.call("Error_GetCode", code) is None
    assert code.args.code == UNIMPLEMENTED
    assert table.call("Error_ForEachPayload", Memory(caller.ErrorForEachPayload, error=error)) is None
    assert stub.seen("Error_ForEachPayload").calls == 0
    assert table.message(error) == (
        f"flashxla: the framework asks for function {index} of the PJRT extension TpuTopology, which only TPUs have"
    )
    assert not memory.changed()
    assert stub.live_errors == 0


def test_the_plugins_errors_are_read_by_the_plugin(
    table: Table, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_FAIL", "Client_Create")
    error = table.call("Client_Create", Memory(caller.ClientCreate, create_options=0, num_options=0))
    code = Memory(caller.ErrorGetCode, error=error)
    assert table.call("Error_GetCode", code) is None
    assert code.args.code == INTERNAL
    assert table.call("Error_ForEachPayload", Memory(caller.ErrorForEachPayload, error=error)) is None
    assert stub.seen("Error_ForEachPayload").calls == 1
    assert table.message(error) == "Client_Create was told to fail"
    assert stub.live_errors == 0


def test_errors_may_be_destroyed_in_any_order(table: Table) -> None:
    memory = Memory(caller.ChipCount)
    errors = [topology(table, index, memory) for index in (3, 4, 5)]
    assert len(set(errors)) == 3
    for error, index in zip((errors[1], errors[2], errors[0]), (4, 5, 3), strict=True):
        assert f"function {index} " in table.message(error)
