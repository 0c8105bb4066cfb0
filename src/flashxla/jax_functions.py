"""Calling a declared operation on JAX arrays: its arguments as they are given, and its results as users get them."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from flashxla import jax_calls
from flashxla.jax_avals import aval_of
from flashxla.jax_partition import explicit_mesh
from flashxla.ops.flash_attn_varlen import FLASH_ATTN_VARLEN, flash_attn_varlen_func
from flashxla.ops.messages import type_error
from flashxla.ops.op import Call, Op
from flashxla.ops.parameters import Tensor
from flashxla.xla import registration


def call(op: Op, args: Sequence[Any]) -> Any:
    """Call an operation with its own arguments, in order."""
    registration.register_jax()
    resolved, operands = resolve(op, args)
    return _returned(resolved, jax_calls.custom_call(resolved, operands))


def call_even(sequences: int, **arguments: Any) -> Any:
    """Call flash_attn_varlen_func for `sequences` of one length each, one behind the other."""
    registration.register_jax()
    resolved, operands = resolve(FLASH_ATTN_VARLEN, flash_attn_varlen_func(**arguments))
    # Before JAX 0.10 there is no shard_map over an explicit axis over which jax.vmap maps.
    is_old = jax.__version_info__ < (0, 10) and explicit_mesh(operands) is not None
    made = jax_calls.even_sequences if sequences and not is_old else jax_calls.custom_call
    return _returned(resolved, made(resolved, operands))


def resolve(op: Op, args: Sequence[Any]) -> tuple[Call, list[jax.Array]]:
    """A call that is not made yet, and its operands. Raises TypeError and ValueError."""
    values = dict(zip(op.names, args, strict=True))
    tensors = {t.name: _array(op, t, values) for t in op.tensors}
    avals = {name: None if x is None else aval_of(x) for name, x in tensors.items()}
    resolved = op.resolve(avals, {s.name: values[s.name] for s in op.scalars})
    return resolved, [x for x in (tensors[name] for name, _ in resolved.operands) if x is not None]


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
