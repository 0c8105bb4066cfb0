"""A resolved call as a JAX computation: one custom call with its aliases declared.

Used by the JAX front end, and to produce the HLO that PyTorch/XLA embeds.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from flashxla.ops.op import Aval, Call


def shape_dtype(aval: Aval) -> jax.ShapeDtypeStruct:
    """An aval in JAX's terms."""
    return jax.ShapeDtypeStruct(aval.shape, jnp.dtype(aval.dtype))


def custom_call(call: Call, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """The custom call on `operands` (the call's, in its order)."""
    attributes = {name: _attribute(value) for name, value in call.ffi_attributes.items()}
    ffi_call = jax.ffi.ffi_call(
        call.native.target,
        [shape_dtype(r) for r in call.results],
        vmap_method="sequential",
        input_output_aliases={operand: result for result, operand in call.aliases},
    )
    return list(ffi_call(*operands, **attributes))


def _attribute(value: int | float | str) -> np.int64 | np.float64 | str:
    """The handlers decode 64-bit numbers; JAX would make smaller ones of Python's."""
    if isinstance(value, str):
        return value
    return np.float64(value) if isinstance(value, float) else np.int64(value)
