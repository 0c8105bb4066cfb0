"""A decode step of a Llama in plain jax.numpy: one new token of each sequence. Its attention is an argument."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.llama import Config

Params = dict[str, Any]
# (q [S, Hq, D], k [S, Hk, D], v, a layer's cache, batch) -> (out [S, Hq, D], the cache)
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any, dict[str, jax.Array]], tuple[jax.Array, Any]]


def init(config: Config, dtype: str, seed: int = 0) -> Params:
    """Random weights, made on the device, a layer at a time."""
    norm = jnp.ones(config.hidden, dtype)

    def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return (jax.random.normal(key, shape, jnp.float32) * shape[0] ** -0.5).astype(dtype)

    @jax.jit
    def layer(key: jax.Array) -> Params:
        keys = jax.random.split(key, len(config.matrices))
        named = zip(keys, config.matrices.items(), strict=True)
        return {name: normal(k, shape) for k, (name, shape) in named}

    head_key, embed_key, *keys = jax.random.split(jax.random.key(seed), config.layers + 2)
    big = jax.jit(normal, static_argnums=1)
    return {
        "embed": big(embed_key, (config.vocab, config.hidden)),
        "layers": [{**layer(key), "norm_1": norm, "norm_2": norm} for key in keys],
        "norm": norm,
        "head": big(head_key, (config.hidden, config.vocab)),
    }


def step(
    config: Config,
    attend: Attend,
    params: Params,
    caches: Sequence[Any],
    tokens: jax.Array,
    batch: dict[str, jax.Array],
) -> tuple[jax.Array, list[Any]]:
    """Logits [S, vocab] of the next tokens, and the caches. batch: "context_lens" [S] and what `attend` wants."""
    x = params["embed"][tokens]
    rotation = _rotation(config, batch["context_lens"] - 1)
    q_width, kv_width = config.widths
    new_caches = []
    for layer, cache in zip(params["layers"], caches, strict=True):
        qkv = _norm(config, x, layer["norm_1"]) @ layer["qkv"]
        q, k, v = (
            part.reshape(len(tokens), -1, config.dim)
            for part in jnp.split(qkv, (q_width, q_width + kv_width), axis=-1)
        )
        out, cache = attend(_rotated(q, rotation), _rotated(k, rotation), v, cache, batch)
        new_caches.append(cache)
        x = x + out.reshape(len(tokens), -1) @ layer["out"]
        gate, up = jnp.split(_norm(config, x, layer["norm_2"]) @ layer["gate_up"], 2, axis=-1)
        x = x + (jax.nn.silu(gate) * up) @ layer["down"]
    x = _norm(config, x, params["norm"])
    return jnp.dot(x, params["head"], preferred_element_type=jnp.float32), new_caches


def _norm(config: Config, x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + config.eps)
    return (wide * scale).astype(x.dtype) * weight


def _rotation(config: Config, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    frequencies = config.theta ** (-jnp.arange(0, config.dim, 2) / config.dim)
    angles = positions[:, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]


def _rotated(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    cos, sin = rotation
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
