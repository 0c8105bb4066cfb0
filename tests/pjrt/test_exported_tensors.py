"""DLPack capsules of libflashxla_pjrt.so: whose memory lives how long, also past the interpreter's end."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.pjrt.caller import DELETER, ManagedTensor, take

ROOT = Path(__file__).parents[2]


class Owner:
    """A Python object that the memory of tensors belongs to, and their structs."""

    def __init__(self) -> None:
        self.tensors: list[ManagedTensor] = []


class Exporter:
    """Makes capsules with a library."""

    def __init__(self, library: Path) -> None:
        self._function = ctypes.PyDLL(str(library)).flashxla_pjrt_new_capsule
        self._function.restype = ctypes.py_object
        self._function.argtypes = (ctypes.c_void_p, ctypes.py_object)

    def capsule(self, owner: Owner, **fields: int) -> Any:
        """Of a new tensor of the owner's."""
        tensor = ManagedTensor(**fields)
        owner.tensors.append(tensor)
        return self._function(ctypes.addressof(tensor), owner)


@pytest.fixture
def exporter(adapter_library: Path) -> Exporter:
    return Exporter(adapter_library)


def delete(tensor: ManagedTensor) -> None:
    """As a consumer does that knows no Python: without the interpreter's lock."""
    DELETER(tensor.deleter)(ctypes.addressof(tensor))


def test_a_capsule_that_nobody_takes_lets_go_of_the_owner(exporter: Exporter) -> None:
    owner = Owner()
    alive = weakref.ref(owner)
    capsule = exporter.capsule(owner)
    del owner
    assert alive() is not None
    del capsule
    assert alive() is None


def test_who_takes_the_tensor_holds_the_owner(exporter: Exporter) -> None:
    owner = Owner()
    alive = weakref.ref(owner)
    capsule = exporter.capsule(owner)
    tensor = take(capsule)
    del owner, capsule
    assert alive() is not None
    delete(tensor)
    assert alive() is None


def test_each_capsule_holds_the_owner(exporter: Exporter) -> None:
    owner = Owner()
    alive = weakref.ref(owner)
    capsules = [exporter.capsule(owner) for _ in range(2)]
    del owner
    capsules.pop()
    assert alive() is not None
    capsules.pop()
    assert alive() is None


def test_the_tensor_is_the_one_that_was_given(exporter: Exporter) -> None:
    tensor = take(exporter.capsule(Owner(), data=0x1000, ndim=2, dtype_bits=16, byte_offset=8))
    assert (tensor.data, tensor.ndim, tensor.dtype_bits, tensor.byte_offset) == (0x1000, 2, 16, 8)
    delete(tensor)


# A consumer that is not Python's calls the deleter in a handler that exit() calls after the interpreter's end.
# Handlers run in reverse: the memory is read first.
OUTLIVES = """
import ctypes, sys
from pathlib import Path
from tests.pjrt import caller, test_exported_tensors as tests

owner = tests.Owner()
owner.memory = ctypes.create_string_buffer(b"the memory is there")
exporter = tests.Exporter(Path(sys.argv[1]))
capsule = exporter.capsule(owner, data=ctypes.addressof(owner.memory))
tensor = caller.take(capsule)
libc = ctypes.CDLL(None)
address, deleter, data = (ctypes.c_void_p(it) for it in (ctypes.addressof(tensor), tensor.deleter, tensor.data))
libc.__cxa_atexit(deleter, address, None)
libc.__cxa_atexit(libc.puts, data, None)
del owner, tensor, capsule
not_taken = exporter.capsule(tests.Owner())  # until the interpreter takes its modules apart
"""


def test_a_consumer_outlives_the_interpreter(adapter_library: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OUTLIVES, str(adapter_library)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "the memory is there\n"), done.stderr
