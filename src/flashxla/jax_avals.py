"""Avals in JAX's terms, and JAX's arrays as avals."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from flashxla.ops.op import Aval


def shape_dtype(aval: Aval) -> jax.ShapeDtypeStruct:
    """An aval in JAX's terms."""
    return jax.ShapeDtypeStruct(aval.shape, jnp.dtype(aval.dtype))


def aval_of(x: jax.Array) -> Aval:
    """The aval of an array."""
    return Aval(tuple(x.shape), str(x.dtype))
