"""Decode with a small Llama over several devices in JAX: heads in parts, by the shardings of weights and caches alone.

    python examples/tensor_parallel_jax.py
    XLA_FLAGS=--xla_force_host_platform_device_count=2 python examples/tensor_parallel_jax.py

There is no shard_map and no collective in this file. The weights' columns of heads and the caches' dimension of heads
have a NamedSharding, and jit does the rest: each device writes and reads the keys and values of its own heads, in
place, and the devices add up what the attention and the feed-forward part give, twice a layer. The weights are random,
so the tokens mean nothing; they are the same on any number of devices.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flashxla import jax as fx

Params = dict[str, Any]
Caches = list[tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Config:
    """The model's shape, and that of its caches."""

    vocabulary: int = 512
    width: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    feed_forward: int = 512
    page: int = 16  # tokens of a page
    pages_each: int = 8  # pages of a sequence

    @property
    def dim(self) -> int:
        """Of a head."""
        return self.width // self.heads


class Model:
    """Weights and caches on a mesh with one axis, "heads"."""

    def __init__(self, config: Config, mesh: jax.sharding.Mesh, sequences: int) -> None:
        self.config = config
        self.mesh = mesh
        self.rng = np.random.default_rng(0)
        columns, rows = (
            P(None, "heads"),
            P("heads"),
        )  # of a weight that makes heads, and of one that takes them
        of_heads, of_kv = config.heads * config.dim, config.kv_heads * config.dim
        self.embed = self.put(self.normal(config.vocabulary, config.width), P())
        self.layers = [
            {
                "q": self.put(self.normal(config.width, of_heads), columns),
                "k": self.put(self.normal(config.width, of_kv), columns),
                "v": self.put(self.normal(config.width, of_kv), columns),
                "o": self.put(self.normal(of_heads, config.width), rows),
                "gate": self.put(self.normal(config.width, config.feed_forward), columns),
                "up": self.put(self.normal(config.width, config.feed_forward), columns),
                "down": self.put(self.normal(config.feed_forward, config.width), rows),
            }
            for _ in range(config.layers)
        ]
        pages = sequences * config.pages_each
        shape = (pages, config.page, config.kv_heads, config.dim)
        cached = P(None, None, "heads")
        self.caches: Caches = [
            (self.put(np.zeros(shape, np.float32), cached), self.put(np.zeros(shape, np.float32), cached))
            for _ in range(config.layers)
        ]
        # Any page can be anywhere: sequence s has every `sequences`-th page.
        self.table = np.arange(pages, dtype=np.int32).reshape(config.pages_each, sequences).T.copy()

    def normal(self, *shape: int) -> np.ndarray:
        """Random weights."""
        return (self.rng.standard_normal(shape) * shape[0] ** -0.5).astype(np.float32)

    def put(self, x: np.ndarray, spec: P) -> jax.Array:
        """An array on the mesh."""
        return jax.device_put(x, NamedSharding(self.mesh, spec))


def norm(x: jax.Array) -> jax.Array:
    """Root mean square."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def rotated(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary positions, of x [T, H, D]."""
    frequencies = 10000.0 ** (-jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
    angles = (positions[:, None] * frequencies)[:, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


@functools.partial(jax.jit, static_argnames=("config", "new"), donate_argnames="caches")
def step(
    config: Config,
    embed: jax.Array,
    layers: list[Params],
    caches: Caches,
    tokens: jax.Array,
    lens: jax.Array,
    table: jax.Array,
    new: int,
) -> tuple[jax.Array, Caches]:
    """Add `new` tokens to each sequence; returns the next token of each, and the caches, which are the same buffers.

    tokens [S * new]; lens [S]: the keys of each sequence, the new ones among them.
    """
    sequences = len(lens)
    starts = new * jnp.arange(sequences + 1, dtype=jnp.int32)
    count = jnp.full((1,), sequences, jnp.int32)
    positions = (lens[:, None] - new + jnp.arange(new)).reshape(-1)
    x = embed[tokens]
    updated = []
    for weights, cache in zip(layers, caches, strict=True):
        normed = norm(x)
        q, k, v = ((normed @ weights[name]).reshape(len(x), -1, config.dim) for name in "qkv")
        out, cache = fx.ragged_paged_attention(
            rotated(q, positions),
            rotated(k, positions),
            v,
            cache,
            lens,
            table,
            starts,
            count,
            config.dim**-0.5,
            max_seqlen_q=new,
        )
        updated.append(cache)
        x = x + out.reshape(len(x), -1) @ weights["o"]
        normed = norm(x)
        x = x + (jax.nn.silu(normed @ weights["gate"]) * (normed @ weights["up"])) @ weights["down"]
    last = norm(x[starts[1:] - 1])
    return jnp.argmax(last @ embed.T, -1), updated


def main() -> None:
    """Write tokens, and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=8, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=48, help="to write for each sequence")
    args = parser.parse_args()

    config = Config()
    mesh = jax.make_mesh((jax.device_count(),), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    model = Model(config, mesh, args.sequences)
    longest = config.page * config.pages_each
    if args.prompt + args.tokens > longest:
        parser.error(f"--prompt and --tokens: together at most {longest}")
    prompt = model.rng.integers(0, config.vocabulary, args.sequences * args.prompt)
    fixed = (config, model.embed, model.layers)

    lens = jnp.full((args.sequences,), args.prompt, jnp.int32)
    tokens, caches = step(*fixed, model.caches, jnp.asarray(prompt), lens, model.table, new=args.prompt)
    lens = lens + 1
    decode = step.lower(*fixed, caches, tokens, lens, model.table, new=1).compile()
    text = decode.as_text() or ""
    moves = re.findall(r"\b(all-gather|all-to-all|collective-permute|all-reduce)(?:-start)?\(", text)
    counts = ", ".join(f"{moves.count(name)} {name}" for name in sorted(set(moves))) or "none"
    print(f"{jax.device_count()} devices; collectives of a step: {counts}")

    buffers = [s.data.unsafe_buffer_pointer() for k, _ in caches for s in k.addressable_shards]
    written = [tokens]
    started = time.monotonic()
    for _ in range(args.tokens - 1):
        tokens, caches = step(*fixed, caches, tokens, lens, model.table, new=1)
        lens = lens + 1
        written.append(tokens)
    rows = np.stack(written, 1).tolist()
    seconds = time.monotonic() - started
    assert buffers == [s.data.unsafe_buffer_pointer() for k, _ in caches for s in k.addressable_shards]
    for number, row in enumerate(rows):
        print(f"sequence {number}: {' '.join(map(str, row))}")
    print(f"{args.sequences * (args.tokens - 1) / seconds:,.0f} tokens/s; the caches stayed in their buffers")


if __name__ == "__main__":
    main()
