"""Products with experts' weights, for mixtures of experts, in plain JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def _swiglu_of_gpt_oss(gate: jax.Array, up: jax.Array, alpha: float = 1.702, limit: float = 7.0) -> jax.Array:
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)


# By tpu-inference's names: of the gate's half and the other half of a product.
ACTIVATIONS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "silu": lambda gate, up: jax.nn.silu(gate) * up,
    "gelu": lambda gate, up: jax.nn.gelu(gate, approximate=False) * up,
    "gelu_tanh": lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
    "swigluoai": _swiglu_of_gpt_oss,
}


def grouped_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    rhs_scale: jax.Array | None,
    rhs_bias: jax.Array | None,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    fuse_act: str | None = None,
    preferred_element_type: Any = None,
) -> jax.Array:
    """lhs [rows, K], sorted by expert, times rhs [experts, K, N]: row i with its expert's matrix.

    Args:
        group_sizes: the rows of each expert.
        group_offset: [1], the first expert that rhs has; 0 where it has all.
        fuse_act: an activation of the two halves of N.
    """
    if fuse_act is not None and fuse_act not in ACTIVATIONS:
        raise NotImplementedError(
            f"flashxla-vllm: activation {fuse_act!r} of experts; {', '.join(ACTIVATIONS)}"
        )
    if rhs_scale is not None:
        raise NotImplementedError("flashxla-vllm: quantised weights of experts")
    del group_offset  # expert parallelism is refused (refusals.py), so rhs has all experts
    out = jax.lax.ragged_dot(lhs, rhs, group_sizes, preferred_element_type=jnp.float32)
    if rhs_bias is not None:
        expert = jnp.repeat(jnp.arange(rhs.shape[0]), group_sizes, total_repeat_length=lhs.shape[0])
        out += rhs_bias[expert, 0]
    if fuse_act is not None:
        out = ACTIVATIONS[fuse_act](*jnp.split(out, 2, axis=-1))
    return out.astype(preferred_element_type or lhs.dtype)


def gather_and_sum(
    x: jax.Array,
    indices: jax.Array,
    topk_weights: jax.Array,
    reduce_group_size: int,
    topk_wgt_zero_nan: bool = False,
) -> jax.Array:
    """out[t] = sum over k of topk_weights[t, k] * x[indices[t * group + k]]."""
    rows = x[indices].reshape(-1, reduce_group_size, x.shape[-1]).astype(jnp.float32)
    weights = topk_weights.reshape(-1, reduce_group_size, 1).astype(jnp.float32)
    return (rows * weights).sum(axis=1).astype(x.dtype)
