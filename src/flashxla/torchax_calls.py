"""Calls on torchax's tensors outside of functions that JAX traces: their programs, and what these may donate.

torchax looks at every argument of a call several times, in Python. A call like one before it needs none of that: it
goes straight to its program (`short_way`). The long way (flashxla.torchax) stays for every call that is new or not
plain: gradients, views, traced functions, modes, debugging.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from torchax.tensor import Tensor

from flashxla import jax_calls, torch_calls
from flashxla.jax_avals import aval_of
from flashxla.ops.op import Call, Op
from flashxla.torch_calls import LONG_WAY, Values

_MAX_REPEATS = 4096
_repeats: dict[Any, _Repeat] = {}


class _Holder:
    def __init__(self) -> None:
        self._elem = object()


def _references(x: Any) -> int:
    return sys.getrefcount(x._elem)


_ALONE = _references(_Holder())


def is_alone(x: torch.Tensor) -> bool:
    """Whether no other tensor holds x's array, as torchax's clone() and detach() do, so that it may be donated."""
    return isinstance(x, Tensor) and _references(x) <= _ALONE


@functools.lru_cache(maxsize=4096)
def program(call: Call, donated: tuple[int, ...]) -> Callable[..., Sequence[jax.Array]]:
    """A call as a function of its operands' arrays, of which it takes some for its updates."""
    return jax.jit(lambda *operands: jax_calls.custom_call(call, operands), donate_argnums=donated)


def short_way(op: Op, values: Values) -> Any:
    """What the public function returns for these arguments, the first of which is a tensor; or LONG_WAY."""
    env = values[0]._env
    with torch._C.DisableTorchFunction():  # torchax's mode sees even the reading of an attribute
        if _is_watched(env):
            return LONG_WAY
        key = (op.name, *[_described(value) for value in values])
        try:
            repeat = _repeats.get(key)
        except TypeError:  # a value that has no hash
            return LONG_WAY
        if repeat is None:
            _learn(op, key, values)
            return LONG_WAY
        if torch.is_grad_enabled() and any([values[i].requires_grad for i in repeat.operands]):
            return LONG_WAY
        return repeat.run(values, env)


class _Repeat:
    """A call that was made, ready to be made again."""

    def __init__(self, op: Op, call: Call) -> None:
        self.operands = [op.names.index(name) for name, _ in call.operands]
        self._call, self._programs = call, dict[tuple[int, ...], Any]()

    def run(self, values: Values, env: Any) -> Any:
        updates = [(i, values[self.operands[i]]) for i in self._call.updates]
        donated = tuple([i for i, x in updates if is_alone(x)])
        if (run := self._programs.get(donated)) is None:
            run = self._programs[donated] = program(self._call, donated)
        arrays = run(*[values[i]._elem for i in self.operands])
        count = len(self._call.results)
        for (_, x), new in zip(updates, arrays[count:], strict=True):
            x._elem = new
        results = [Tensor(x, env) for x in arrays[:count]]
        return results[0] if count == 1 else tuple(results) or None


def _is_watched(env: Any) -> bool:
    """Whether torchax is off, or something else looks on, which must see a call."""
    return (
        torch._C._len_torch_function_stack() != 1
        or torch._C._len_torch_dispatch_stack() != 1
        or torch._C._get_function_stack_at(0) is not env._function_mode  # env.enabled is not kept up
        or torch._C._autograd._profiler_enabled()  # type: ignore[attr-defined]
        or env.config.debug_print_each_op
        or env.config.debug_accuracy_for_each_op
    )


def _described(value: Any) -> Any:
    """What a call's program depends on. 1 is equal to True and to 1.0, and not the same argument."""
    if type(value) is Tensor:
        return type(value._elem), value._elem.shape, value._elem.dtype
    return type(value), value


def _learn(op: Op, key: Any, values: Values) -> None:
    """Keep a call, if it is plain. Raises TypeError and ValueError for a wrong one, as the long way does."""
    tensors = {t.name: values[op.names.index(t.name)] for t in op.tensors}
    given = [x for x in tensors.values() if x is not None]
    if any(type(x) is not Tensor or isinstance(x._elem, jax.core.Tracer) for x in given):
        return
    checked = torch_calls.checked(op, values)
    if any(x is not value for x, value in zip(checked, values, strict=True)):
        return
    avals = {name: None if x is None else aval_of(x._elem) for name, x in tensors.items()}
    call = op.resolve(avals, {s.name: values[op.names.index(s.name)] for s in op.scalars})
    if len(_repeats) == _MAX_REPEATS:
        _repeats.clear()
    _repeats[key] = _Repeat(op, call)
