"""jax.vmap of the operations: one call of the batch, equal to the calls one by one; index tensors may hold anything."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flashxla.jax as fx

V, T, S, P, B, HQ, HK, D, M = 3, 7, 3, 6, 4, 4, 2, 8, 3


def inputs(rng: np.random.Generator) -> dict[str, Any]:
    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal((V, *shape), np.float32)

    starts = np.sort(rng.integers(0, T + 1, (V, S + 1)), axis=1)
    starts[0] = [1, 4, 9, 5]  # the second sequence ends outside the tokens, and the third begins there
    starts[1] = [0, 5, 3, 7]  # the third sequence begins inside the first
    pages = [rng.permutation(2 * P)[: S * M].reshape(S, M) - 1 for _ in range(V)]
    slots = [rng.permutation(P * B + 4)[: T - 2] - 2 for _ in range(V)]
    given = {
        "q": normal(T, HQ, D),
        "k": normal(T, HK, D),
        "v": normal(T, HK, D),
        "k_cache": normal(P, B, HK, D),
        "v_cache": normal(P, B, HK, D),
        "interleaved": normal(P, B, 2 * HK, D),
        "stacked": normal(2, P, B, HK, D),
        "lse": normal(HQ, T),
        "lens": rng.integers(-1, M * B + 2, (V, S)).astype(np.int32),
        "table": np.stack(pages).astype(np.int32),
        "starts": starts.astype(np.int32),
        "count": rng.integers(1, S + 2, (V, 1)).astype(np.int32),
        "slots": np.stack(slots).astype(np.int32),
        "slopes": np.abs(normal(HQ)),
        "slopes_of_sequences": np.abs(normal(S, HQ)),
        "sinks": normal(HQ),
        "scale": np.abs(normal(1)),
    }
    return {name: jnp.asarray(x) for name, x in given.items()}


def paged(
    q: Any, k_cache: Any, v_cache: Any, lens: Any, table: Any, starts: Any, count: Any, **others: Any
) -> Any:
    options = {
        "slopes": "alibi_slopes",
        "sinks": "s_aux",
        "scale": "k_scale",
        "slopes_of_sequences": "alibi_slopes",
    }
    given = {options[name]: x for name, x in others.items()}
    index = (lens, table, starts, count)
    return fx.paged_attention(q, (k_cache, v_cache), *index, 0.3, return_softmax_lse=True, **given)


def fused(
    q: Any,
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    lens: Any,
    table: Any,
    starts: Any,
    count: Any,
    slots: Any = None,
) -> Any:
    index = (lens, table, starts, count)
    return fx.ragged_paged_attention(
        q, k, v, (k_cache, v_cache), *index, 0.3, slot_mapping=slots, return_softmax_lse=True
    )


def packed(
    q: Any, k: Any, v: Any, k_cache: Any, v_cache: Any, lens: Any, table: Any, starts: Any, count: Any
) -> Any:
    qkv = jnp.concatenate([q, k, v], axis=1)
    index = (lens, table, starts, count)
    return fx.ragged_paged_attention_qkvpacked(qkv, (k_cache, v_cache), *index, 0.3)


def varlen(q: Any, k: Any, v: Any, starts: Any, sinks: Any = None) -> Any:
    return fx.flash_attn_varlen_func(
        q, k, v, T, starts, T, starts, causal=True, s_aux=sinks, return_softmax_lse=True
    )


def gradient(q: Any, k: Any, v: Any, starts: Any, sinks: Any = None) -> Any:
    def loss(*given: Any) -> Any:
        out, lse = varlen(*given[:3], starts, *given[3:])
        return (out**2).sum() + jnp.where(jnp.isfinite(lse), lse, 0.0).sum()

    given = (q, k, v) if sinks is None else (q, k, v, sinks)
    return jax.grad(loss, tuple(range(len(given))))(*given)


def gradient_of_dense(q: Any, k: Any, v: Any, sinks: Any) -> Any:
    def loss(*given: Any) -> Any:
        *qkv, sinks = given
        parts = (x.reshape(T, 1, *x.shape[1:]) for x in qkv)
        return (fx.flash_attn_func(*parts, s_aux=sinks) ** 2).sum()

    return jax.grad(loss, (0, 1, 2, 3))(q, k, v, sinks)


def dense(q: Any, k: Any, v: Any) -> Any:
    out, lse, _ = fx.flash_attn_func(*(x.reshape(1, *x.shape) for x in (q, k, v)), return_attn_probs=True)
    return out, lse


INDEX = "lens table starts count"
PAGED = f"q k_cache v_cache {INDEX}"
FUSED = f"q k v k_cache v_cache {INDEX}"

# The function, its arguments, those that all calls of the batch share, and whether it is one call.
TABLE: list[tuple[Callable[..., Any], str, str, bool]] = [
    (paged, PAGED, "", True),
    (paged, PAGED, "k_cache v_cache", True),
    (paged, f"{PAGED} slopes sinks", f"sinks {INDEX}", True),
    (paged, f"{PAGED} slopes_of_sequences scale", "count", True),
    (paged, f"{PAGED} slopes", "q slopes", True),
    (paged, f"{PAGED} sinks", "", False),
    (fused, FUSED, "", True),
    (fused, f"{FUSED} slots", "", True),
    (fused, FUSED, "k_cache v_cache", True),
    (packed, FUSED, "", True),
    (varlen, "q k v starts", "", True),
    (varlen, "q k v starts sinks", "k v sinks", True),
    (gradient, "q k v starts", "", True),
    (gradient, "q k v starts", "k v starts", True),
    (gradient, "q k v starts sinks", "sinks", True),
    (gradient_of_dense, "q k v sinks", "sinks", True),
    (dense, "q k v", "", True),
    (lambda k, v, k_cache, v_cache, slots: fx.reshape_and_cache_flash(k, v, k_cache, v_cache, slots),
     "k v k_cache v_cache slots", "", True),
    (lambda k, v, interleaved, slots: fx.reshape_and_cache(k, v, interleaved, slots, "interleaved"),
     "k v interleaved slots", "interleaved", True),
    (lambda k, v, stacked, slots: fx.reshape_and_cache(k, v, stacked, slots, "stacked"),
     "k v stacked slots", "", False),
    (lambda q, lse: fx.merge_attn_states(q, lse, 2 * q, lse[::-1]), "q lse", "", True),
]  # fmt: skip


@pytest.mark.parametrize(("function", "names", "shared", "at_once"), TABLE)
def test_equals_the_calls_one_by_one(
    rng: np.random.Generator, function: Any, names: str, shared: str, at_once: bool
) -> None:
    given = inputs(rng)
    arrays = {n: given[n][0] if n in shared.split() else given[n] for n in names.split()}
    axes = {n: None if n in shared.split() else 0 for n in arrays}

    def call(arrays: dict[str, Any]) -> Any:
        return function(**arrays)

    batched = jax.jit(jax.vmap(call, in_axes=(axes,)))
    got = batched(arrays)
    each = [call({n: x if axes[n] is None else x[i] for n, x in arrays.items()}) for i in range(V)]
    jax.tree.map(lambda x, *e: np.testing.assert_allclose(x, jnp.stack(e), rtol=2e-6, atol=2e-6), got, *each)
    looped = re.search(r" while\(", batched.lower(arrays).compile().as_text())
    assert (looped is None) == at_once


def test_a_batch_of_batches(rng: np.random.Generator) -> None:
    given = inputs(rng)
    index = [given[n] for n in INDEX.split()]
    queries = jnp.stack([given["q"], -given["q"]])

    def inner(q: Any, k: Any, v: Any) -> Any:
        return jax.vmap(paged, (0, None, None, 0, 0, 0, 0))(q, k, v, *index)

    caches = given["k_cache"][:2], given["v_cache"][:2]
    got = jax.vmap(inner)(queries, *caches)
    each = [inner(q, k, v) for q, k, v in zip(queries, *caches, strict=True)]
    jax.tree.map(lambda x, *e: np.testing.assert_allclose(x, jnp.stack(e), rtol=2e-6, atol=2e-6), got, *each)
