"""Caches that keep their memory on TorchTPU: they are donated to the program that updates them.

TorchTPU lets a tensor share a buffer with its clones until one of them is changed, and takes a donated buffer from all
of them. Only its own in-place operations know whether a buffer is shared: one that changes nothing goes first.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch

from flashxla.xla import pjrt_adapter


def own(tensor: torch.Tensor) -> None:
    """Give a tensor a buffer that no clone of it shares. One that it has to itself stays."""
    if tensor.numel():
        with torch.no_grad():
            tensor.index_copy_(0, *_no_rows(tensor.shape[1:], tensor.dtype, tensor.device))


def addresses(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Where tensors lie: the inputs of programs that read one number of each."""
    torch.accelerator.synchronize()
    with pjrt_adapter.load().watch_inputs() as seen:
        for tensor in tensors:
            tensor.view(-1)[:1].cpu()
    return [inputs[0] for inputs in seen]


def donatable(tensors: Sequence[torch.Tensor | None], position: int) -> bool:
    """Whether a call's operand is all of its storage, which no other operand is a view of."""
    tensor = tensors[position]
    assert tensor is not None
    storage = tensor.untyped_storage()
    return (
        0 < tensor.nbytes == storage.nbytes()
        and tensor.is_contiguous()
        and sum(other is not None and other.untyped_storage() is storage for other in tensors) == 1
    )


@functools.lru_cache
def _no_rows(
    shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """An empty index and its rows."""
    return torch.empty(0, dtype=torch.int64, device=device), torch.empty(
        (0, *shape), dtype=dtype, device=device
    )
