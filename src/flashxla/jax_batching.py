"""jax.vmap of a call: one call of the whole batch where the operation can say that, else one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from flashxla.jax_partition import Batch, Function, partitioned
from flashxla.ops.op import Call

Compute = Callable[[Call], Function]


def vmapped(call: Call, compute: Compute, batch: Batch | None = None) -> Function:
    """A call, or a batch of calls, that jax.vmap takes. compute: how one call is made on one device."""
    function = jax.custom_batching.custom_vmap(partitioned(call, batch, lambda c, b: _local(c, b, compute)))

    @function.def_vmap
    def rule(size: int, batched: list[bool], *operands: jax.Array) -> tuple[list[jax.Array], list[bool]]:
        merged, arrays = _nested(size, batched, batch, operands)
        got = vmapped(call, compute, merged)(*arrays)
        if batch:
            got = [x.reshape(size, batch.size, *x.shape[1:]) for x in got]
        return got, [True] * len(got)

    return function


def _nested(size: int, batched: list[bool], inner: Batch | None, operands: Any) -> tuple[Batch, list[jax.Array]]:
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
    return lambda *operands: _one_after_the_other(call, batch, compute, operands)


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
