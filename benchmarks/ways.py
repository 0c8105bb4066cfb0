"""Ways to do the attention of a decode step over a paged cache in JAX, each with the cache that it wants."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import flashxla.jax as fx
from benchmarks.llama import PAGE, Config
from benchmarks.llama_jax import Attend

Batch = dict[str, jax.Array]
# Beside the ways: a layer's write and attention without a program.
KERNELS = "the operations' kernels alone, 1 layer (from PyTorch, a plan each)"


def share_of_layer(way: str) -> str:
    """What the row is called that has a layer's write and attention in a program."""
    return f"write + attention by {way}, 1 layer of the step"


@dataclasses.dataclass(frozen=True)
class Way:
    """attend: as llama_jax.step wants it. cache: a layer's (config, number of pages, dtype)."""

    name: str
    attend: Attend
    cache: Callable[[Config, int, str], Any]
    reads_cache: bool = True


@functools.cache
def _maker(shape: tuple[int, ...], dtype: str) -> Callable[[jax.Array], jax.Array]:
    """Compiled once for all layers."""
    return jax.jit(lambda key: jax.random.normal(key, shape, dtype))


def _pages_first(config: Config, pages: int, dtype: str) -> Any:
    make = _maker((pages, PAGE, config.heads[1], config.dim), dtype)
    return tuple(make(key) for key in jax.random.split(jax.random.key(1)))


def _heads_first(config: Config, pages: int, dtype: str) -> Any:
    return tuple(x.transpose(2, 0, 1, 3) for x in _pages_first(config, pages, dtype))


def _ours(config: Config, qkv: Any, cache: Any, batch: Batch) -> tuple[jax.Array, Any]:
    return fx.ragged_paged_attention_qkvpacked(
        qkv,
        cache,
        batch["context_lens"],
        batch["tables"],
        batch["starts"],
        batch["num_seqs"],
        config.dim**-0.5,
        slot_mapping=batch["slots"],
        max_seqlen_q=1,
    )


def _split(config: Config, qkv: Any) -> list[jax.Array]:
    """q [S, Hq, D], k [S, Hk, D], v."""
    q_heads, kv_heads = config.heads
    return jnp.split(qkv, (q_heads, q_heads + kv_heads), axis=1)


def _pallas(config: Config, qkv: Any, cache: Any, batch: Batch) -> tuple[jax.Array, Any]:
    from jax.experimental.pallas.ops.gpu import paged_attention as pallas

    from benchmarks.peers import pallas_width

    q, k, v = _split(config, qkv)
    block, offset = batch["slots"] // PAGE, batch["slots"] % PAGE
    keys, values = (
        pages.at[:, block, offset].set(new.swapaxes(0, 1)) for pages, new in zip(cache, (k, v), strict=True)
    )
    table = batch["tables"]
    table = jnp.pad(table, ((0, 0), (0, pallas_width(table.shape[1]) - table.shape[1])))
    out = pallas.paged_attention(q * config.dim**-0.5, keys, values, table, batch["context_lens"])
    return out, (keys, values)


def _gather(config: Config, qkv: Any, cache: Any, batch: Batch) -> tuple[jax.Array, Any]:
    q, k, v = _split(config, qkv)
    block, offset = batch["slots"] // PAGE, batch["slots"] % PAGE
    cache = tuple(pages.at[block, offset].set(new) for pages, new in zip(cache, (k, v), strict=True))
    keys, values = (pages[batch["tables"]].reshape(len(q), -1, *k.shape[1:]) for pages in cache)
    grouped = q.reshape(len(q), k.shape[1], -1, q.shape[-1]) * config.dim**-0.5
    scores = jnp.einsum("shgd,skhd->shgk", grouped, keys, preferred_element_type=jnp.float32)
    real = jnp.arange(keys.shape[1]) < batch["context_lens"][:, None]
    weights = jax.nn.softmax(jnp.where(real[:, None, None], scores, -jnp.inf), axis=-1)
    out = jnp.einsum("shgk,skhd->shgd", weights.astype(q.dtype), values)
    return out.reshape(q.shape), cache


def _nothing(config: Config, qkv: Any, cache: Any, batch: Batch) -> tuple[jax.Array, Any]:
    # All three are used, so that XLA leaves out nothing else.
    q, k, v = _split(config, qkv)
    return q + jnp.repeat(k + v, q.shape[1] // k.shape[1], axis=1), cache


OURS = Way("flashxla in JAX", _ours, _pages_first)
NOTHING = Way("without attention and write", _nothing, lambda *_: (), reads_cache=False)
PALLAS = Way("Pallas paged_attention + donated scatter", _pallas, _heads_first)
GATHER = Way("jax.numpy: donated scatter, gather, softmax", _gather, _pages_first)
