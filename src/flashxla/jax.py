"""JAX front end: eager, jit, grad, scan, shard_map, vmap, export; on cpu and cuda.

The operations of `flashxla.ops`, functional: one that updates a cache returns the new cache, behind its results.
Where the caller donates the cache (`jax.jit` with donate_argnums, or a loop's carry), the new one is the same buffer
and nothing is copied.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

try:
    import jax
    import jax.export
    import jax.numpy as jnp
except ImportError as error:
    raise ImportError("flashxla.jax needs JAX: pip install jax") from error

from flashxla import jax_calls, setup_custom_call
from flashxla.jax_avals import aval_of
from flashxla.ops import OPS
from flashxla.ops.flash_attn_forms import FORMS, Form, Offsets
from flashxla.ops.messages import type_error
from flashxla.ops.op import Call, Op
from flashxla.ops.parameters import Tensor
from flashxla.xla import registration

if TYPE_CHECKING:
    from flashxla.ops.functions import *  # noqa: F403


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What jax.export must be told to take flashxla's custom calls: its argument `disabled_checks`.

    jax.export promises stability for the custom calls that it knows alone. An exported program calls libraries of
    flashxla, so whoever loads it calls flashxla.setup_custom_call() first.
    """
    targets = registration.targets()
    return [jax.export.DisabledSafetyCheck.custom_call(target) for target in sorted(targets)]


def _function(op: Op, public: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    @functools.wraps(public)
    def function(*args: Any, **kwargs: Any) -> Any:
        return _call(op, public(*args, **kwargs))

    function.__module__ = __name__
    return function


def _call(op: Op, args: Sequence[Any]) -> Any:
    registration.register_jax()
    values = dict(zip(op.names, args, strict=True))
    tensors = {t.name: _array(op, t, values) for t in op.tensors}
    avals = {name: None if x is None else aval_of(x) for name, x in tensors.items()}
    call = op.resolve(avals, {s.name: values[s.name] for s in op.scalars})
    operands = [x for x in (tensors[name] for name, _ in call.operands) if x is not None]
    return _returned(call, jax_calls.custom_call(call, operands))


def _returned(call: Call, arrays: Sequence[jax.Array]) -> Any:
    """The results and the updated arguments; those that were given as a pair are one."""
    results: list[Any] = list(arrays[: len(call.results)])
    updated = {call.operands[i][0]: x for i, x in zip(call.updates, arrays[len(results) :], strict=True)}
    for tensor in call.op.tensors:
        if tensor.name in updated and tensor.pair and tensor.pair[1] in updated:
            results.append((updated.pop(tensor.name), updated.pop(tensor.pair[1])))
    results += updated.values()
    return results[0] if len(results) == 1 else tuple(results)


def _array(op: Op, tensor: Tensor, values: dict[str, Any]) -> jax.Array | None:
    x = values[tensor.name]
    if x is None:
        return None
    if tensor.number and isinstance(x, numbers.Real):
        return jnp.full((1,), float(x), jnp.float32)
    try:
        return jnp.asarray(x)
    except TypeError as error:
        label = op.label(tensor.name, lambda name: values[name] is not None)
        got = f"{x!r} ({type(x).__name__})"
        raise type_error(op.function, label, got, f"an array of {', '.join(tensor.dtypes)}") from error


def _form(form: Callable[..., Form]) -> Callable[..., Any]:
    def tensor_of(offsets: Offsets, q: jax.Array) -> jax.Array:
        return offsets.length * jnp.arange(offsets.sequences + 1, dtype=jnp.int32)

    @functools.wraps(form)
    def function(*args: Any, **kwargs: Any) -> Any:
        return form(*args, **kwargs).call(_FUNCTIONS["flash_attn_varlen_func"], tensor_of)

    function.__module__ = __name__
    return function


_FUNCTIONS = {op.function: _function(op, op.public) for op in OPS if op.public}
_FUNCTIONS |= {form.__name__: _form(form) for form in FORMS}
globals().update(_FUNCTIONS)

__all__ = ["export_checks", "setup_custom_call", *_FUNCTIONS]
