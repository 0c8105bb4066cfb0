"""Calling a declared operation on JAX arrays: its arguments as they are given, and its results as users get them."""

from __future__ import annotations

import numbers
import reprlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flashxla import jax_calls
from flashxla.jax_avals import aval_of
from flashxla.jax_partition import explicit_mesh
from flashxla.ops.flash_attn_varlen import FLASH_ATTN_VARLEN, flash_attn_varlen_func
from flashxla.ops.messages import type_error, value_error
from flashxla.ops.op import Call, Op
from flashxla.ops.parameters import Tensor
from flashxla.xla import registration


def call(op: Op, args: Sequence[Any], pair: Any = None) -> Any:
    """Call an operation with its own arguments, in order. pair: what a pair that it updates was given as."""
    registration.register_jax()
    resolved, operands = resolve(op, args)
    return _returned(resolved, jax_calls.custom_call(resolved, operands), pair)


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


def _returned(call: Call, arrays: Sequence[jax.Array], pair: Any = None) -> Any:
    """The results and the updated arguments; those that were given as a pair are one, of the same kind."""
    results: list[Any] = list(arrays[: len(call.results)])
    updated = {call.operands[i][0]: x for i, x in zip(call.updates, arrays[len(results) :], strict=True)}
    for tensor in call.op.tensors:
        if tensor.name in updated and tensor.pair and tensor.pair[1] in updated:
            both = updated.pop(tensor.name), updated.pop(tensor.pair[1])
            results.append(both if pair is None else jax.tree.unflatten(jax.tree.structure(pair), both))
    results += updated.values()
    return results[0] if len(results) == 1 else tuple(results)


def _array(op: Op, tensor: Tensor, values: dict[str, Any]) -> jax.Array | None:
    x = values[tensor.name]
    if x is None:
        return None
    if tensor.number and isinstance(x, numbers.Real):
        return jnp.full((1,), float(x), jnp.float32)
    label = op.label(tensor.name, lambda name: values[name] is not None)
    accepted = f"an array of {', '.join(tensor.dtypes)}"
    array = as_array(op.function, label, x, accepted, "int32" in tensor.dtypes)
    if not all(isinstance(size, int) for size in array.shape):
        got = f"shape [{', '.join(map(str, array.shape))}]"
        raise value_error(op.function, label, got, "sizes that are known when the program is made")
    if array.weak_type and str(array.dtype) not in tensor.dtypes:
        return array.astype(jnp.float32 if array.dtype.kind == "f" else jnp.int32)
    return array


def as_array(function: str, label: str, x: Any, accepted: str, indices: bool) -> jax.Array:
    """An argument as JAX's array. indices: its integers do not wrap around. Raises TypeError."""
    try:
        return jnp.asarray(_in_32_bits(x) if indices else x)
    except (TypeError, ValueError, OverflowError) as error:
        got = f"{reprlib.repr(x)} ({type(x).__name__})"
        raise type_error(function, label, got, accepted) from error


def _in_32_bits(x: Any) -> Any:
    """Python's and NumPy's integers as the nearest that 32 bits hold, where JAX would take them modulo 2^32.

    The bounds are indices of nothing, so that what is out of range stays out of range.
    """
    is_numpy = isinstance(x, (np.ndarray, np.generic))
    if is_numpy and jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        return x  # JAX keeps the 64 bits
    if not is_numpy and not all(isinstance(one, numbers.Integral) for one in jax.tree.leaves(x)):
        return x
    array = np.asarray(x)
    if array.dtype.kind not in "iu" or np.can_cast(array.dtype, np.int32):
        return x
    bounds = np.iinfo(np.int32)
    return array.clip(bounds.min, bounds.max).astype(np.int32)
