"""Attention in plain XLA, with attention.py's arguments: the peer of `flashxla bench vllm`.

FLASHXLA_VLLM_ATTENTION=xla chooses it. It gathers each query's keys, so it is slow wherever there are many queries.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

# Queries that are attended at a time: each has a copy of its sequence's keys and values.
_CHUNK = 64


def attend(
    scale: float,
    kv_cache: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    context_lens: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    num_seqs: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The new cache [pages, page size, KV heads, 2 * head size] and the output [tokens, heads, head size]."""
    page_size, tokens = kv_cache.shape[1], query.shape[0]
    token = jnp.arange(tokens)
    sequence = jnp.searchsorted(query_start_loc[1:], token, side="right")
    sequence = jnp.minimum(sequence, context_lens.shape[0] - 1)
    used = token < query_start_loc[num_seqs[0]]
    position = context_lens[sequence] - query_start_loc[sequence + 1] + token
    page = block_tables[sequence, jnp.clip(position // page_size, 0, block_tables.shape[1] - 1)]
    slot = jnp.where(used, page * page_size + position % page_size, kv_cache.shape[0] * page_size)
    flat = kv_cache.reshape(-1, *kv_cache.shape[2:])
    flat = flat.at[slot].set(jnp.concatenate([key, value], -1).astype(kv_cache.dtype), mode="drop")
    kv_cache = flat.reshape(kv_cache.shape)
    chunk = min(_CHUNK, tokens)
    split = [
        x.reshape(tokens // chunk, chunk, *x.shape[1:]) for x in (query, block_tables[sequence], position)
    ]
    out = jax.lax.map(lambda xs: _attend_chunk(scale, kv_cache, *xs), tuple(split))
    return kv_cache, out.reshape(query.shape)


@functools.partial(jax.jit, static_argnums=0)
def _attend_chunk(
    scale: float, kv_cache: jax.Array, query: jax.Array, tables: jax.Array, position: jax.Array
) -> jax.Array:
    tokens, _, size = query.shape
    pages = kv_cache[tables].reshape(tokens, -1, *kv_cache.shape[2:])
    keys, values = pages[..., :size], pages[..., size:]
    grouped = query.reshape(tokens, keys.shape[2], -1, size)
    scores = scale * jnp.einsum("tkgd,tskd->tkgs", grouped, keys, preferred_element_type=jnp.float32)
    visible = jnp.arange(keys.shape[1]) <= position[:, None]
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), axis=-1)
    out = jnp.einsum("tkgs,tskd->tkgd", weights.astype(values.dtype), values)
    return jnp.nan_to_num(out.reshape(query.shape)).astype(query.dtype)
