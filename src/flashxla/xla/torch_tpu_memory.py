"""Caches that keep their memory on TorchTPU: they are donated to the program that updates them.

TorchTPU lets a tensor share a buffer with its clones until one of them is changed, and takes a donated buffer from all
of them. Only its own in-place operations know whether a buffer is shared: one that changes nothing goes first, for all
the caches of a call together.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch

from flashxla.xla import pjrt_adapter


def own(tensors: list[torch.Tensor]) -> None:
    """Give each tensor a buffer that no clone of it shares. One that it has to itself stays.

    They are multiplied by a literal 1 in one program, of which XLA keeps nothing: only a shared buffer is read, for its
    copy. (A number would be the program's input, and every buffer would be read and written.)
    """
    if tensors:
        with torch.no_grad():
            torch._foreach_mul_(tensors, _one())


def addresses(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Where tensors lie: the inputs of programs that read one number of each."""
    torch.accelerator.synchronize()
    with pjrt_adapter.load().watch_inputs() as seen:
        for tensor in tensors:
            tensor.view(-1)[:1].cpu()
    return [inputs[0] for inputs in seen]


def donatable(tensors: Sequence[torch.Tensor], positions: Iterable[int]) -> list[int]:
    """Those of a call's operands that are all of their storage, which no other operand is a view of."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return [
        i
        for i in positions
        if 0 < tensors[i].nbytes == storages[i].nbytes()
        and tensors[i].is_contiguous()
        and sum([other is storages[i] for other in storages]) == 1
    ]


@functools.cache
def _one() -> torch.Tensor:
    """A literal in the programs of the operations that take it. An integer, which no dtype is promoted by."""
    from torch_tpu._internal.compile import tpu_torch_compile

    return tpu_torch_compile.make_constant_tensor(torch.ones((), dtype=torch.int32))
