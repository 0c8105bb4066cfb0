"""A decode step of a Llama in plain jax.numpy: one new token of each sequence. Its attention is an argument."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.llama import Config

Params = dict[str, Any]
# (config, qkv [S, Hq + 2 Hk, D], a layer's cache, batch) -> (out [S, Hq, D], the cache)
Attend = Callable[[Config, jax.Array, Any, dict[str, jax.Array]], tuple[jax.Array, Any]]


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
    new_caches = []
    for layer, cache in zip(params["layers"], caches, strict=True):
        qkv = (_norm(config, x, layer["norm_1"]) @ layer["qkv"]).reshape(len(tokens), -1, config.dim)
        rotated, values = jnp.split(qkv, [sum(config.heads)], axis=1)
        qkv = jnp.concatenate([_rotated(rotated, rotation), values], axis=1)
        out, cache = attend(config, qkv, cache, batch)
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
    angles = positions[:, None, None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def _rotated(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    # One expression, so that XLA reads x as it writes the result. Two that are put together become a slower kernel.
    cos, sin = rotation
    halves = x.astype(jnp.float32).reshape(*x.shape[:2], 2, -1)
    signs = jnp.array([[-1.0], [1.0]])
    return (halves * cos + halves[:, :, ::-1] * (sin * signs)).reshape(x.shape).astype(x.dtype)
