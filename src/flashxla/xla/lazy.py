"""Calls on lazy XLA tensors by a short way: what PyTorch's dispatcher would find out in five steps is known here.

A lazy step traces every operation in Python each time, and its host time is what bounds small batches. The long way
through autograd, functionalization and the XLA kernel (flashxla.torch_library) does the same and stays for every call
that is not plain: gradients, torch.compile, modes, transforms, subclasses, other devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from flashxla import torch_calls
from flashxla.ops.op import Op
from flashxla.torch_calls import LONG_WAY, PLAIN

_MAX_PROGRAMS = 4096

_is_functional = torch._is_functional_tensor
_value_of = torch._from_functional_tensor
_sync: Callable[[torch.Tensor], None] = torch._functionalize_sync  # type: ignore[attr-defined]
_replace: Callable[..., None] = torch._functionalize_replace  # type: ignore[attr-defined]
_commit: Callable[[torch.Tensor], None] = torch._functionalize_commit_update  # type: ignore[attr-defined]
# Tells torch_xla that an update takes the old value's place, which lets it donate the buffer.
_propagate: Callable[..., None] = torch.ops.aten._propagate_xla_data.default._op


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """What a functional tensor wraps, with all that is pending on it."""
    _sync(tensor)
    return _value_of(tensor)


def update(tensors: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Make plain lazy tensors the new values of functional ones, as an update in place."""
    for tensor, value in zip(tensors, values, strict=True):
        _propagate(_value_of(tensor), value)
        _replace(tensor, value)
        _commit(tensor)
        _sync(tensor)
    torch_calls.mark_updated(tensors)


def short_way(op: Op) -> Callable[[tuple[Any, ...]], Any]:
    """A function of an op's arguments that runs it on plain lazy tensors, or returns LONG_WAY."""
    tensors = tuple(i for i, is_tensor in enumerate(op.is_tensor) if is_tensor)
    scalars = tuple(i for i, is_tensor in enumerate(op.is_tensor) if not is_tensor)
    programs: dict[Any, _Program] = {}

    def run(values: tuple[Any, ...]) -> Any:
        if _is_special():
            return LONG_WAY
        inner = list(values)
        key = [values[i] for i in scalars]
        may_need_grad = torch.is_grad_enabled()
        for i in tensors:
            x = values[i]
            if x is None:
                key.append(None)
                continue
            if type(x) not in PLAIN or not _is_functional(x) or (may_need_grad and x.requires_grad):
                return LONG_WAY
            inner[i] = x = unwrapped(x)
            key += x.shape, x.dtype, x.device
        program = programs.get(known := tuple(key))
        if program is None:
            if len(programs) == _MAX_PROGRAMS:
                programs.clear()
            program = programs[known] = _Program(op, tuple(inner))
        results = program.run(inner)
        count = program.num_results
        if op.updated_positions:
            given = [values[i] for i in op.updated_positions if values[i] is not None]
            update(given, [_value_of(new) for new in results[count:]])
        return results[0] if count == 1 else tuple(results[:count]) or None

    return run


class _Program:
    """The computation of a call, and the order of its operands."""

    def __init__(self, op: Op, values: tuple[Any, ...]) -> None:
        from flashxla.xla import embed, spmd

        call, self._computation = embed.program(op, torch_calls.signature(op, values))
        self._name = embed.name_of(call)
        self._operands = [op.names.index(name) for name, _ in call.operands][::-1]
        self._run = embed.user_computation()
        self.num_results = len(call.results)
        self._warn = functools.partial(spmd.warn_of_gathers, call) if spmd.is_on() else None

    def run(self, values: list[Any]) -> list[torch.Tensor]:
        """The results, and behind them what the call updates, as functional tensors."""
        operands = [values[i] for i in self._operands]
        if self._warn:
            self._warn(operands[::-1])
        return self._run(self._name, operands, self._computation)


def _is_special() -> bool:
    """Whether something looks on, which must see the call."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )
