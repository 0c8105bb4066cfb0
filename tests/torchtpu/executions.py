"""Which memory TorchTPU's programs get: the adapter's table is the one it calls, so a function of it can be watched."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Iterator

import torch

from flashxla.xla import pjrt_adapter
from tests.pjrt import caller

_EXECUTE, _UNSAFE_POINTER = 55, 73
_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


class _UnsafePointer(caller.Args):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("buffer", ctypes.c_void_p),
        ("pointer", ctypes.c_size_t),
    )


@contextlib.contextmanager
def watch() -> Iterator[list[tuple[int, ...]]]:
    """Collect the addresses of the inputs of each program that runs in the block."""
    library = ctypes.CDLL(str(pjrt_adapter.load().path))
    library.GetPjrtApi.restype = ctypes.c_void_p
    table = library.GetPjrtApi() + caller.TABLE_HEAD
    slot = ctypes.c_void_p.from_address(table + 8 * _EXECUTE)
    execute, pointer = (
        _FUNCTION(ctypes.c_void_p.from_address(table + 8 * at).value) for at in (_EXECUTE, _UNSAFE_POINTER)
    )
    runs: list[tuple[int, ...]] = []

    def address(buffer: int) -> int:
        args = _UnsafePointer(ctypes.sizeof(_UnsafePointer), None, buffer, 0)
        assert not pointer(ctypes.addressof(args))
        return args.pointer

    def watched(raw: int) -> int | None:
        args = caller.Execute.from_address(raw)
        (inputs,) = (ctypes.c_void_p * 1).from_address(args.argument_lists)
        buffers = (ctypes.c_void_p * args.num_args).from_address(inputs) if args.num_args else ()
        runs.append(tuple(map(address, buffers)))
        return execute(raw)

    original, callback = slot.value, _FUNCTION(watched)
    slot.value = ctypes.cast(callback, ctypes.c_void_p).value
    try:
        yield runs
    finally:
        slot.value = original


def addresses(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Where tensors are: the inputs of programs that read one element of each."""
    torch.accelerator.synchronize()
    with watch() as runs:
        for tensor in tensors:
            tensor.view(-1)[:1].cpu()
    return [inputs[0] for inputs in runs]
