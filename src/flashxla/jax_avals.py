"""Avals in JAX's terms, JAX's arrays as avals, and the mesh axes over which arrays vary inside jax.shard_map."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from flashxla.ops.op import Aval


def shape_dtype(aval: Aval) -> jax.ShapeDtypeStruct:
    """An aval in JAX's terms."""
    return jax.ShapeDtypeStruct(aval.shape, jnp.dtype(aval.dtype))


def aval_of(x: jax.Array) -> Aval:
    """The aval of an array."""
    return Aval(tuple(x.shape), str(x.dtype))


def varying_axes(arrays: Iterable[jax.Array]) -> frozenset[str]:
    """The axes over which one of them varies, as jax.shard_map with check_vma keeps count of it."""
    axes: frozenset[str] = frozenset()
    for x in arrays:
        aval: Any = jax.typeof(x)
        # JAX before 0.10 has it as an attribute of its own.
        manual = getattr(aval, "manual_axis_type", None)
        axes |= manual.varying if manual is not None else getattr(aval, "vma", frozenset())
    return axes


def vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """The same array, as one that varies over these axes, too."""
    missing = tuple(sorted(axes - varying_axes([x]))) if axes else ()
    if not missing:
        return x
    lax: Any = jax.lax
    # JAX before 0.9 has it under another name.
    return lax.pcast(x, missing, to="varying") if hasattr(lax, "pcast") else lax.pvary(x, missing)
