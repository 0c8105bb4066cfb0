"""Attention whose keys are spread over devices: functions for the inside of jax.shard_map.

Training shards tokens: `ring_attention` passes keys and values around a ring of devices. Decoding shards the cache:
each device attends to its own keys, and `merge_attn_states_over` merges what they found.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flashxla import native
from flashxla.jax_avals import vary, varying_axes
from flashxla.jax_functions import call, resolve
from flashxla.ops.arguments import window_sides
from flashxla.ops.flash_attn_forms import SAME_LENGTHS, check_dtype, shape_of
from flashxla.ops.flash_attn_varlen import FLASH_ATTN_VARLEN, flash_attn_varlen_func
from flashxla.ops.flash_attn_varlen_backward import FLASH_ATTN_VARLEN_BACKWARD
from flashxla.ops.messages import in_words_of, type_error, value_error
from flashxla.ops.parameters import FLOATS


def ring_order(tokens: int, devices: int) -> np.ndarray:
    """The order of a row of tokens in which each device gets as much causal work as the others.

    The row is cut into 2 * devices chunks; device i gets chunk i and, counted from the end, chunk i again.

    Args:
        tokens: a multiple of 2 * devices.
        devices: along the mesh axis over which tokens are sharded.

    Returns:
        int64 [tokens]: x[ring_order(...)] is to be sharded; it is also the position of each of its tokens.
        np.argsort of it restores the order.

    Raises:
        ValueError: tokens is no such multiple.
    """
    if devices < 1:
        raise value_error("ring_order", "devices", devices, "a number of devices")
    if tokens % (2 * devices):
        raise value_error("ring_order", "tokens", tokens, f"a multiple of {2 * devices}, twice the devices")
    chunks = np.arange(tokens).reshape(2 * devices, -1)
    order = [chunk for i in range(devices) for chunk in (i, 2 * devices - 1 - i)]
    return chunks[order].reshape(-1)


class _Options(NamedTuple):
    axis_name: str
    max_seqlen: int
    softmax_scale: float
    window: tuple[int, int]
    softcap: float
    deterministic: bool


class _Part(NamedTuple):
    """What one call attends to: the queries of this device, and one chunk of keys of another."""

    cu_seqlens_q: jax.Array
    cu_seqlens_k: jax.Array
    seqused_k: jax.Array


def ring_attention(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens: Any,
    max_seqlen: int,
    *,
    axis_name: str,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] | None = (-1, -1),
    softcap: float = 0.0,
    return_softmax_lse: bool = False,
    deterministic: bool = False,
) -> Any:
    """Causal attention over packed sequences whose tokens are sharded over a mesh axis; inside jax.shard_map.

    Keys and values pass around the devices, while each computes with those that it has. Nothing is gathered. The
    backward pass does the same, with the gradients of keys and values beside them.

    Args:
        q: [T / n, Hq, D], this device's part of the T tokens in `ring_order`; n devices along the axis.
        k, v: [T / n, Hk, D] and [T / n, Hk, Dv], of the same tokens.
        cu_seqlens: int32 [S+1], offsets of the sequences among the T tokens in their own order; on every device. They
            must ascend from 0 or more to at most T: others do no harm, but give other results than one device gives.
        max_seqlen: upper bound of the lengths.
        axis_name: of the mesh axis.
        softmax_scale, softcap, deterministic: as flash_attn_varlen_func.
        window_size: (left, right); causal attention has nothing to the right.
        return_softmax_lse: also return the LSE.

    Returns:
        out [T / n, Hq, Dv], in the order of q; with return_softmax_lse also the LSE, float32 [Hq, T / n]. Gradients: of
        q, k and v, through both.

    Raises:
        TypeError, ValueError: wrong dtypes or shapes, no such axis; FLASHXLA_CHECK=1.
    """
    function = "ring_attention"
    if native.is_checking():
        # Lengths that reach beyond a chunk's keys are how its calls place their queries.
        accepted = "0: the check refuses the lengths that its parts have on purpose"
        raise value_error(function, "FLASHXLA_CHECK", 1, accepted)
    q, k, v, cu_seqlens = (jnp.asarray(x) for x in (q, k, v, cu_seqlens))
    left, right = window_sides(function, window_size)
    whole = flash_attn_varlen_func(
        q,
        k,
        v,
        max_seqlen,
        cu_seqlens,
        max_seqlen,
        cu_seqlens,
        softmax_scale=softmax_scale,
        causal=True,
        window_size=(left, right),
        softcap=softcap,
        deterministic=deterministic,
    )
    try:  # what the calls of a step take
        resolve(FLASH_ATTN_VARLEN, whole)
    except (TypeError, ValueError) as error:
        raise in_words_of(error, function, SAME_LENGTHS) from error
    if str(q.dtype) not in FLOATS:
        raise type_error(function, "q", f"dtype {q.dtype}", ", ".join(FLOATS))
    if q.shape[0] % 2 or k.shape[0] != q.shape[0] or v.shape[0] != q.shape[0]:
        got = f"{q.shape[0]}, {k.shape[0]} and {v.shape[0]} tokens"
        raise value_error(function, "q, k, v", got, "the same even number of tokens, in ring_order")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    options = _Options(
        axis_name, int(max_seqlen), float(scale), (int(left), -1), float(softcap), bool(deterministic)
    )
    # Each varies over the ring's axis, and over whatever others (data, heads) one of them varies over.
    axes = varying_axes([q, k, v, cu_seqlens]) | set(_checked_axes(function, axis_name))
    out, lse = _ring(options, *(vary(x, axes) for x in (q, k, v, cu_seqlens)))
    return (out, lse) if return_softmax_lse else out


def merge_attn_states_over(out: Any, lse: Any, axis_name: str) -> tuple[jax.Array, jax.Array]:
    """Merge the attention results of all devices along a mesh axis, each over its own keys; inside jax.shard_map.

    For decoding with a cache that is sharded by sequence: every device has some of each sequence's keys.

    Args:
        out: [T, Hq, D], this device's result.
        lse: float32 [Hq, T]; -inf or +inf marks a part without keys.
        axis_name: of the mesh axis.

    Returns:
        (out [T, Hq, D], lse [Hq, T]) of all keys, on every device.

    Raises:
        TypeError, ValueError: wrong dtypes or shapes, no such axis.
    """
    function = "merge_attn_states_over"
    tokens, heads, _ = shape_of(function, "out", out, "T Hq D")
    shape_of(function, "lse", lse, "Hq T", Hq=heads, T=tokens)
    check_dtype(function, "out", out, FLOATS)
    check_dtype(function, "lse", lse, ("float32",))
    _checked_axes(function, axis_name, of_vmap=True)
    lse = jnp.where(jnp.isposinf(lse), -jnp.inf, lse)
    # The largest is a common factor, which has no gradient of its own.
    top = jax.lax.pmax(jax.lax.stop_gradient(lse), axis_name)
    weight = jnp.where(jnp.isneginf(lse), 0.0, jnp.exp(lse - jnp.where(jnp.isneginf(top), 0.0, top)))
    total = jax.lax.psum(weight, axis_name)
    # A part without keys is not used, whatever its out holds.
    mine = jnp.where(weight.T[:, :, None] > 0, weight.T[:, :, None] * out.astype(jnp.float32), 0.0)
    merged = jax.lax.psum(mine, axis_name) / jnp.where(total == 0, 1.0, total).T[:, :, None]
    return merged.astype(out.dtype), top + jnp.log(jnp.where(total == 0, 1.0, total))


def _checked_axes(function: str, axis_name: Any, of_vmap: bool = False) -> tuple[str, ...]:
    """The names of an axis, or of several as one. Raises ValueError where the call is not inside their shard_map.

    of_vmap: that of a jax.vmap around the call will do.
    """
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    axes = sorted(jax.sharding.get_abstract_mesh().manual_axes)
    if names and all(name in axes or (of_vmap and _is_bound(name)) for name in names):
        return names
    if not axes:
        got = f"{axis_name!r} outside jax.shard_map"
        raise value_error(
            function, "axis_name", got, "a mesh axis of the jax.shard_map that the call is inside"
        )
    accepted = f"an axis of the jax.shard_map that the call is inside: {', '.join(map(repr, axes))}"
    raise value_error(function, "axis_name", repr(axis_name), accepted)


def _is_bound(name: Any) -> bool:
    try:
        hash(name)
        jax.lax.axis_size(name)
    except (NameError, TypeError, ValueError):  # a number is an axis of an array
        return False
    return True


# The ring


def _part(offsets: jax.Array, device: Any, chunk_of_keys: Any, devices: int, chunk: int) -> _Part:
    """The index tensors of a call.

    Each document is two sequences, one of each chunk of queries. Causality does the rest: lengths place the queries
    among the chunk's keys as they are placed among all tokens, and keys behind a document's end are in no query's past.
    """
    key_start = chunk_of_keys * chunk
    keys = jnp.clip(offsets, key_start, key_start + chunk)
    starts = device * chunk, (2 * devices - 1 - device) * chunk
    first, second = (jnp.clip(offsets, start, start + chunk) for start in starts)
    # A length reaches to the last query's own position. Between the two halves lies a sequence of what no document
    # has: of a negative length, it is skipped.
    nothing = jnp.full((1,), -1, jnp.int32)
    return _Part(
        cu_seqlens_q=jnp.concatenate([first - starts[0], second - starts[1] + chunk]),
        cu_seqlens_k=jnp.concatenate([keys - key_start] * 2),
        seqused_k=jnp.concatenate([first[1:] - keys[:-1], nothing, second[1:] - keys[:-1]]),
    )


def _each_part(options: _Options, offsets: jax.Array, step: Any, tokens: int) -> list[tuple[slice, _Part]]:
    """The two chunks of keys that this device has in a step, and the call for each."""
    devices = jax.lax.axis_size(options.axis_name)
    device = jax.lax.axis_index(options.axis_name)
    owner = (device - step) % devices
    chunk = tokens // 2
    chunks = (owner, 2 * devices - 1 - owner)
    return [
        (slice(half * chunk, (half + 1) * chunk), _part(offsets, device, number, devices, chunk))
        for half, number in enumerate(chunks)
    ]


def _passed_on(options: _Options, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """What the device before this one in the ring has."""
    devices = jax.lax.axis_size(options.axis_name)
    ring = [(i, (i + 1) % devices) for i in range(devices)]
    return tuple(jax.lax.ppermute(x, options.axis_name, ring) for x in arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(
    options: _Options, q: jax.Array, k: jax.Array, v: jax.Array, offsets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _forward(options, q, k, v, offsets)


def _forward(
    options: _Options, q: jax.Array, k: jax.Array, v: jax.Array, offsets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    tokens, heads, _ = q.shape

    def step(carry: Any, number: Any) -> tuple[Any, None]:
        k, v, out, lse = carry
        following = _passed_on(options, k, v)  # on its way while this step computes
        for rows, part in _each_part(options, offsets, number, tokens):
            arguments = flash_attn_varlen_func(
                q, k[rows], v[rows], **part._asdict(), **_scalars(options), return_softmax_lse=True
            )
            some, its_lse = call(FLASH_ATTN_VARLEN, arguments)
            out, lse = _merged(out, lse, some.astype(jnp.float32), its_lse)
        return (*following, out, lse), None

    devices = jax.lax.axis_size(options.axis_name)
    out = jnp.zeros((tokens, heads, v.shape[-1]), jnp.float32)
    lse = jnp.full((heads, tokens), -jnp.inf)
    # A loop's carry keeps its type: it varies as its results do.
    axes = varying_axes([q])
    k, v, out, lse = (vary(x, axes) for x in (k, v, out, lse))
    (_, _, out, lse), _ = jax.lax.scan(step, (k, v, out, lse), jnp.arange(devices, dtype=jnp.int32))
    return out.astype(q.dtype), lse


def _scalars(options: _Options) -> dict[str, Any]:
    return {
        "max_seqlen_q": options.max_seqlen,
        "max_seqlen_k": options.max_seqlen,
        "softmax_scale": options.softmax_scale,
        "causal": True,
        "window_size": options.window,
        "softcap": options.softcap,
        "deterministic": options.deterministic,
    }


def _merged(
    out: jax.Array, lse: jax.Array, other: jax.Array, other_lse: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """As merge_attn_states, in float32 whatever the results are, so that the parts' roundings do not add up."""
    merged = jnp.logaddexp(lse, other_lse)
    base = jnp.where(jnp.isneginf(merged), 0.0, merged)
    weights = (jnp.exp(x - base).T[:, :, None] for x in (lse, other_lse))
    return sum(w * x for w, x in zip(weights, (out, other), strict=True)), merged  # type: ignore[return-value]


def _save(options: _Options, *arguments: jax.Array) -> tuple[Any, Any]:
    out, lse = _forward(options, *arguments)
    return (out, lse), (*arguments, out, lse)


def _differentiate(options: _Options, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    q, k, v, offsets, out, lse = residuals
    grad_out, grad_lse = cotangents
    scalars = _scalars(options)
    left, right = scalars.pop("window_size")
    op = FLASH_ATTN_VARLEN_BACKWARD

    def step(carry: Any, number: Any) -> tuple[Any, None]:
        k, v, grad_k, grad_v, grad_q = carry
        following = _passed_on(options, k, v)
        grads: list[list[jax.Array]] = [[], []]
        for rows, part in _each_part(options, offsets, number, q.shape[0]):
            arguments = dict.fromkeys(op.names) | scalars
            arguments |= {"q": q, "k": k[rows], "v": v[rows], "out": out, "softmax_lse": lse}
            arguments |= {"grad_out": grad_out, "grad_softmax_lse": grad_lse, **part._asdict()}
            arguments |= {"window_left": left, "window_right": right}
            of_q, *of_keys = call(op, [arguments[name] for name in op.names])
            grad_q = grad_q + of_q.astype(jnp.float32)
            for found, gradient in zip(grads, of_keys, strict=True):
                found.append(gradient.astype(jnp.float32))
        sums = (total + jnp.concatenate(found) for total, found in zip((grad_k, grad_v), grads, strict=True))
        # After the last step keys and their gradients are where they began.
        return (*following, *_passed_on(options, *sums), grad_q), None

    zeros = (jnp.zeros(x.shape, jnp.float32) for x in (k, v, q))
    axes = varying_axes([q])
    carry = tuple(vary(x, axes) for x in (k, v, *zeros))
    devices = jax.lax.axis_size(options.axis_name)
    (_, _, grad_k, grad_v, grad_q), _ = jax.lax.scan(step, carry, jnp.arange(devices, dtype=jnp.int32))
    no_gradient = np.zeros(offsets.shape, jax.dtypes.float0)
    return grad_q.astype(q.dtype), grad_k.astype(k.dtype), grad_v.astype(v.dtype), no_gradient


_ring.defvjp(_save, _differentiate)
