"""jax.vmap of a call: one call for the whole batch where the operation can say that, else one after the other.

A batch of ragged calls is a longer ragged call: tokens, sequences and pages are put one behind the other, and what
counts them is moved on. Where a call has an operand that differs within the batch and that the longer call has in
common (sinks, say), the calls run one after the other.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from flashxla import native
from flashxla.jax_avals import aval_of
from flashxla.jax_partition import Batch, Function, partitioned
from flashxla.ops.op import Call
from flashxla.ops.shapes import Dims

Compute = Callable[[Call], Function]
# What is put one behind the other.
_ROWS = ("T", "Tk", "N", "P")
# What may be one number for each head, or those of each sequence, and which heads.
_OF_SEQUENCES = {"alibi_slopes": "Hq", "q_descale": "Hk", "k_descale": "Hk", "v_descale": "Hk"}


def vmapped(call: Call, compute: Compute, even: bool, batch: Batch | None = None) -> Function:
    """A call, or a batch of calls, that jax.vmap takes.

    compute: how one call is made on one device. even: a call has one sequence, with all tokens.
    """
    function = jax.custom_batching.custom_vmap(partitioned(call, batch, lambda c, b: _local(c, b, compute)))

    @function.def_vmap
    def rule(size: int, batched: list[bool], *operands: jax.Array) -> tuple[list[jax.Array], list[bool]]:
        merged, arrays = _nested(size, batched, batch, operands)
        merged = dataclasses.replace(merged, even=even)
        got = vmapped(call, compute, even, merged)(*arrays)
        if batch:
            got = [x.reshape(size, batch.size, *x.shape[1:]) for x in got]
        return got, [True] * len(got)

    return function


def _nested(
    size: int, batched: list[bool], inner: Batch | None, operands: tuple[jax.Array, ...]
) -> tuple[Batch, list[jax.Array]]:
    """A batch of batches as one batch."""
    if inner is None:
        return Batch(size, tuple(batched)), list(operands)
    flat = []
    for x, outer, has in zip(operands, batched, inner.batched, strict=True):
        if outer or has:
            shape = x.shape[outer + has :]
            x = x if outer else x[None]
            x = x if has else x[:, None]
            x = jnp.broadcast_to(x, (size, inner.size, *shape)).reshape(size * inner.size, *shape)
        flat.append(x)
    either = tuple(o or i for o, i in zip(batched, inner.batched, strict=True))
    return Batch(size * inner.size, either), flat


def _local(call: Call, batch: Batch | None, compute: Compute) -> Function:
    if batch is None:
        return compute(call)
    merge = _MERGES.get(call.op.native)
    # In check mode errors name positions in an index tensor: in that of one call.
    checked = native.is_checking() and not batch.even
    if merge is None or batch.size == 0 or checked:
        return lambda *operands: _one_after_the_other(call, batch, compute, operands)

    def function(*operands: jax.Array) -> list[jax.Array]:
        merged = _Merged(call, batch, operands)
        scalars = merge(merged)
        if scalars is None:
            return _one_after_the_other(call, batch, compute, operands)
        return merged.made(compute, scalars)

    return function


def _one_after_the_other(
    call: Call, batch: Batch, compute: Compute, operands: tuple[jax.Array, ...]
) -> list[jax.Array]:
    function = compute(call)

    def one(mapped: list[jax.Array]) -> list[jax.Array]:
        of_batch = iter(mapped)
        return list(
            function(*(next(of_batch) if b else x for x, b in zip(operands, batch.batched, strict=True)))
        )

    return jax.lax.map(one, [x for x, b in zip(operands, batch.batched, strict=True) if b])


class _Merged:
    """The operands of a batch of calls by field, while they become those of one call."""

    def __init__(self, call: Call, batch: Batch, operands: tuple[jax.Array, ...]) -> None:
        self.call = call
        self.count = batch.size
        self.even = batch.even
        fields = [field for _, field in call.operands]
        self.arrays = dict(zip(fields, operands, strict=True))
        self.batched = dict(zip(fields, batch.batched, strict=True))
        self.dims = dict(zip(fields, call.operand_dims, strict=True))
        # Results behind those of the one call, with one for each call in front.
        self.more: list[jax.Array] = []

    def __contains__(self, field: str) -> bool:
        return field in self.arrays

    def each(self, field: str) -> jax.Array:
        """An operand with one for each call in front."""
        x = self.arrays[field]
        return x if self.batched[field] else jnp.broadcast_to(x, (self.count, *x.shape))

    def put_rows_together(self, field: str) -> bool:
        """Tokens or pages one behind the other. Whether that needs no copy of a cache."""
        at = [i for i, dim in enumerate(self.dims[field]) if dim.symbol in _ROWS]
        assert len(at) == 1, field
        self.arrays[field] = _together(self.each(field), at[0])
        return at[0] == 0

    def moved_on(self, field: str, size: int) -> jax.Array:
        """Numbers of rows, of which each call has `size`, as numbers among those of all; -1 for one that is none."""
        x = self.each(field)
        first = jnp.arange(self.count, dtype=x.dtype).reshape(-1, *[1] * (x.ndim - 1)) * size
        return jnp.where((x >= 0) & (x <= size), x + first, -1)

    def with_gaps(self, x: jax.Array, fill: int) -> jax.Array:
        """[V, S, ...] as [V * (S + 1), ...], with `fill` behind the sequences of each call."""
        if not self.even:
            x = jnp.pad(x, ((0, 0), (0, 1), *[(0, 0)] * (x.ndim - 2)), constant_values=fill)
        return x.reshape(-1, *x.shape[2:])

    def made(self, compute: Compute, scalars: dict[str, Any]) -> list[jax.Array]:
        """The one call's results, as those of each call."""
        op = self.call.op
        # A cache that is updated where it is: newer versions of XLA (jaxlib 0.12) need no copy of it behind this.
        for field in self.call.updated_fields:
            self.arrays[field] = jax.lax.optimization_barrier(self.arrays[field])
        given = {t.name: self.arrays[t.field] for t in op.tensors if t.field in self.arrays}
        avals = {t.name: aval_of(given[t.name]) if t.name in given else None for t in op.tensors}
        call = op.resolve(avals, {**dict(self.call.scalars), **scalars})
        got = compute(call)(*(given[name] for name, _ in call.operands))
        dims = self.call.result_dims[: len(got)]
        return [*(self._apart(x, d) for x, d in zip(got, dims, strict=True)), *self.more]

    def _apart(self, x: jax.Array, dims: Dims) -> jax.Array:
        (at,) = (i for i, dim in enumerate(dims) if dim.symbol in _ROWS)
        split = x.reshape(*x.shape[:at], self.count, x.shape[at] // self.count, *x.shape[at + 1 :])
        return jnp.moveaxis(split, at, 0)


def _together(x: jax.Array, at: int) -> jax.Array:
    """[V, ...] with V put in front of dimension `at` of the others, and the two made one."""
    moved = jnp.moveaxis(x, 0, at)
    return moved.reshape(*moved.shape[:at], -1, *moved.shape[at + 2 :])


def _of_states(merged: _Merged) -> dict[str, Any]:
    for field in list(merged.arrays):
        merged.put_rows_together(field)
    return {}


def _of_cache_writes(merged: _Merged) -> dict[str, Any] | None:
    sizes = merged.call.sizes
    if any(merged.batched.get(field) for field in ("k_scale", "v_scale")):
        return None
    if not _slots_together(merged, sizes["N"], sizes["P"] * sizes["B"]):
        return None
    for field in ("key", "value"):
        merged.put_rows_together(field)
    return {} if _caches_together(merged, merged.call.updated_fields) else None


def _caches_together(merged: _Merged, fields: tuple[str, ...]) -> bool:
    return all([merged.put_rows_together(field) for field in fields])


def _slots_together(merged: _Merged, tokens: int, slots: int) -> bool:
    """A slot for each token. False if their numbers are too large for their type."""
    given = merged.each("slot_mapping")
    if slots * merged.count > jnp.iinfo(given.dtype).max:
        return False
    moved = jnp.where(given < slots, merged.moved_on("slot_mapping", slots), -1)
    moved = jnp.pad(moved, ((0, 0), (0, tokens - given.shape[1])), constant_values=-1)
    merged.arrays["slot_mapping"] = moved.reshape(-1)
    return True


def _of_attention(merged: _Merged) -> dict[str, Any] | None:
    """Ragged attention. Between the sequences of two calls is one more, which is skipped: it has what lies between."""
    call, sizes = merged.call, merged.call.sizes
    batched, arrays = merged.batched, merged.arrays
    is_backward = call.op.native == "attention_backward"
    is_paged = "block_table" in merged
    # Dense keys with lengths of their own could reach the next call's.
    if "seqused_k" in merged and not is_paged:
        return None
    if merged.count * max(sizes["T"], sizes.get("Tk", 0)) > jnp.iinfo(jnp.int32).max:
        return None
    # Sinks are the same for all sequences of a call, and their gradient is a sum over these.
    if is_backward and "sinks" in merged:
        merged.more.append(_gradient_of_sinks(merged))
        del arrays["sinks"]
    elif batched.get("sinks"):
        return None

    if merged.even:
        for field, tokens in (("cu_seqlens_q", "T"), ("cu_seqlens_k", "Tk")):
            arrays[field] = sizes[tokens] * jnp.arange(merged.count + 1, dtype=jnp.int32)
            merged.batched[field] = False
    else:
        arrays["seqused_k"] = merged.with_gaps(_lengths(merged, is_paged), -1)
        arrays["cu_seqlens_q"] = _offsets(merged.moved_on("cu_seqlens_q", sizes["T"]))
    if "num_seqs" in merged:
        arrays["num_seqs"] = jnp.full((1,), merged.count * (sizes["S"] + 1), jnp.int32)
    if "leftpad_k" in merged:
        arrays["leftpad_k"] = merged.with_gaps(merged.each("leftpad_k"), 0)

    if is_paged and not _pages_together(merged):
        return None
    if not is_paged:
        shared = not is_backward and not merged.even and not (batched["k"] or batched["v"])
        if not merged.even:
            moved = merged.each if shared else functools.partial(merged.moved_on, size=sizes["Tk"])
            arrays["cu_seqlens_k"] = _offsets(moved("cu_seqlens_k"))
        if not shared:
            for field in ("k", "v"):
                merged.put_rows_together(field)

    for field in ("q", "key", "value", "qkv", "out", "lse", "grad_out", "grad_lse"):
        if field in merged:
            merged.put_rows_together(field)
    for field, heads in _OF_SEQUENCES.items():
        if batched.get(field) or (field in merged and any(d.symbol == "S" for d in merged.dims[field])):
            if call.updates and heads == "Hk":  # a call that writes takes no scales of sequences
                return None
            arrays[field] = _per_sequence(merged, field, sizes[heads])
    return {"max_seqlen_q": dict(call.attributes)["max_seqlen_q"]}


def _gradient_of_sinks(merged: _Merged) -> jax.Array:
    """[V, Hq], from what each token makes of it. Nothing else in a backward call reads the sinks."""
    sinks = merged.each("sinks")
    lse, out, grad_out = (merged.each(field).astype(jnp.float32) for field in ("lse", "out", "grad_out"))
    delta = jnp.moveaxis((out * grad_out).sum(-1), 1, 2)
    if "grad_lse" in merged:
        delta -= merged.each("grad_lse")
    above = sinks.astype(jnp.float32)[..., None] - lse
    # Tokens outside every sequence may be anything.
    is_seen = (lse > -jnp.inf) & (above > -jnp.inf)
    weighted = jnp.where(is_seen, jnp.exp(jnp.minimum(above, 0)) * delta, 0)
    return -weighted.sum(-1).astype(sinks.dtype)


def _lengths(merged: _Merged, is_paged: bool) -> jax.Array:
    """[V, S]: how many keys each sequence has; -1: it is skipped."""
    sequences = merged.call.sizes["S"]
    if is_paged:
        lengths = merged.each("seqused_k")
    else:
        offsets = merged.each("cu_seqlens_k")
        begin, end = offsets[:, :-1], offsets[:, 1:]
        lengths = jnp.where((begin >= 0) & (end >= begin) & (end <= merged.call.sizes["Tk"]), end - begin, -1)
    if "num_seqs" in merged:
        real = merged.each("num_seqs").reshape(-1, 1)
        lengths = jnp.where(jnp.arange(sequences) < real, lengths, -1)
    return lengths


def _pages_together(merged: _Merged) -> bool:
    sizes, arrays = merged.call.sizes, merged.arrays
    caches = [field for field in ("k", "v") if field in merged]
    updated = bool(merged.call.updates)
    if updated or any(merged.batched[field] for field in caches):
        if "slot_mapping" in merged and not _slots_together(merged, sizes["T"], sizes["P"] * sizes["B"]):
            return False
        table = jnp.where(
            merged.each("block_table") < sizes["P"], merged.moved_on("block_table", sizes["P"]), -1
        )
        if not _caches_together(merged, tuple(caches)):
            return False
    else:
        table = merged.each("block_table")
    arrays["block_table"] = merged.with_gaps(table, 0)
    return True


def _offsets(x: jax.Array) -> jax.Array:
    """[V, S + 1] as [V * (S + 1) + 1]; the last sequence, behind those of the last call, is empty."""
    flat = x.reshape(-1)
    return jnp.append(flat, flat[-1])


def _per_sequence(merged: _Merged, field: str, heads: int) -> jax.Array:
    """A number of each head, one for each sequence."""
    sequences = merged.call.sizes["S"]
    x = merged.each(field)
    if not any(dim.symbol == "S" for dim in merged.dims[field]):
        x = jnp.broadcast_to(x.reshape(merged.count, 1, -1), (merged.count, sequences, heads))
    return merged.with_gaps(x, 0)


_MERGES: dict[str, Callable[[_Merged], dict[str, Any] | None]] = {
    "attention": _of_attention,
    "attention_backward": _of_attention,
    "kv_cache": _of_cache_writes,
    "merge_states": _of_states,
}
