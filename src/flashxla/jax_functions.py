"""Calling a declared operation on JAX arrays: its arguments as they are given, and its results as users get them."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from flashxla import jax_calls
from flashxla.jax_avals import aval_of
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


def call_dense(sequences: int, **arguments: Any) -> Any:
    """Call flash_attn_varlen_func for `sequences` of one length each, whose tensors lie one behind the other.

    It is a batch of calls of one sequence: XLA sees the dimension over which it may shard them.
    """
    registration.register_jax()
    whole, operands = resolve(FLASH_ATTN_VARLEN, flash_attn_varlen_func(**arguments))
    sizes = whole.sizes
    if not sequences:
        return _returned(whole, jax_calls.custom_call(whole, operands))
    one = whole.resized({"S": 1, "T": sizes["T"] // sequences, "Tk": sizes["Tk"] // sequences})
    batched = tuple(dims[0].symbol in ("T", "Tk", "S") and not dims[0].plus for dims in whole.operand_dims)
    split = [
        x.reshape(sequences, -1, *x.shape[1:]) if b else x[:2] if dims[0].plus else x
        for x, b, dims in zip(operands, batched, whole.operand_dims, strict=True)
    ]
    results = jax_calls.batch(one, split, batched, whole)
    out = results[0].reshape(whole.results[0][1].shape)
    if len(results) == 1:
        return out
    return out, jnp.moveaxis(results[1], 0, 1).reshape(whole.results[1][1].shape)


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
