"""A training step of a Llama in JAX, with flashxla's attention and with cuDNN's: `python -m benchmarks.train_step`.

Forward and backward of the layers of a model shaped as Llama 3.2 1B, in bfloat16, over one row of documents. cuDNN,
which JAX calls without the documents' bounds, gets them padded to the longest one.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from flashxla import jax as fx
from flashxla import output_file
from flashxla.bench import machine

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
CASES = {"1 x 8192": (8192,), "4 x 2048": (2048,) * 4, "ragged 8192": (4096, 1900, 1100, 600, 300, 196)}
QUICK = {"2 x 32": (32, 32), "ragged 64": (40, 24)}
ROUNDS, STEPS = 7, 5


@dataclasses.dataclass(frozen=True)
class Model:
    """Its shape; no embedding and no head, which attention has no part in."""

    layers: int = 16
    width: int = 2048
    heads: int = 32
    kv_heads: int = 8
    feed_forward: int = 8192

    @property
    def dim(self) -> int:
        """Of a head."""
        return self.width // self.heads

    def weights(self) -> dict[str, jax.Array]:
        """Random; of all layers, for a scan."""
        shapes = {
            "qkv": (self.width, (self.heads + 2 * self.kv_heads) * self.dim),
            "o": (self.width, self.width),
            "gate_up": (self.width, 2 * self.feed_forward),
            "down": (self.feed_forward, self.width),
        }
        keys = jax.random.split(jax.random.key(0), len(shapes))
        return {
            name: jax.random.normal(key, (self.layers, *shape), jnp.bfloat16) * shape[0] ** -0.5
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    def loss(self, weights: dict[str, jax.Array], x: jax.Array, attend: Attend) -> jax.Array:
        """Some number that depends on every weight. x: [tokens, width]."""
        splits = (self.heads * self.dim, (self.heads + self.kv_heads) * self.dim)

        def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
            parts = jnp.split(_norm(x) @ w["qkv"], splits, axis=-1)
            q, k, v = (part.reshape(len(x), -1, self.dim) for part in parts)
            x = x + attend(q, k, v).reshape(x.shape) @ w["o"]
            gate, up = jnp.split(_norm(x) @ w["gate_up"], 2, axis=-1)
            return x + (jax.nn.silu(gate) * up) @ w["down"], None

        x, _ = jax.lax.scan(layer, x, weights)
        return jnp.mean(jnp.square(_norm(x).astype(jnp.float32) - 1.0))


def _norm(x: jax.Array) -> jax.Array:
    return (x * jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + 1e-5)).astype(
        x.dtype
    )


def flashxla(lens: tuple[int, ...]) -> Attend:
    """One call for all documents."""
    offsets = np.array([0, *itertools.accumulate(lens)], np.int32)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return fx.flash_attn_varlen_func(q, k, v, max(lens), offsets, max(lens), offsets, causal=True)

    return attend


def padded(lens: tuple[int, ...], implementation: Literal["xla", "cudnn"]) -> Attend:
    """jax.nn.dot_product_attention over the documents, each padded to the longest."""
    longest = max(lens)
    starts = np.array([0, *itertools.accumulate(lens[:-1])])
    places = np.minimum(starts[:, None] + np.arange(longest), sum(lens) - 1)
    back = np.concatenate([i * longest + np.arange(n) for i, n in enumerate(lens)])

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if len(set(lens)) == 1:
            q, k, v = (x.reshape(len(lens), longest, *x.shape[1:]) for x in (q, k, v))
        else:
            q, k, v = (x[places] for x in (q, k, v))
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
        out = out.reshape(-1, *out.shape[2:])
        return out if len(set(lens)) == 1 else out[back]

    return attend


def measure(model: Model, lens: tuple[int, ...], attends: dict[str, Attend]) -> dict[str, Any]:
    """Seconds a step of each, in turn, and how far the gradients are from the first one's."""
    weights = model.weights()
    x = jax.random.normal(jax.random.key(1), (sum(lens), model.width), jnp.bfloat16)
    steps = {
        name: jax.jit(jax.value_and_grad(functools.partial(model.loss, attend=attend)))
        for name, attend in attends.items()
    }
    results = {name: step(weights, x) for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            started = time.perf_counter()
            for _ in range(STEPS):
                result = step(weights, x)
            jax.block_until_ready(result)
            seconds[name].append((time.perf_counter() - started) / STEPS)
    first = next(iter(results.values()))
    return {
        name: {
            "seconds": statistics.median(seconds[name]),
            "samples": seconds[name],
            "loss": float(results[name][0]),
            "gradient_error": max(
                float(jnp.linalg.norm((a - b).astype(jnp.float32)) / jnp.linalg.norm(b.astype(jnp.float32)))
                for a, b in zip(jax.tree.leaves(results[name][1]), jax.tree.leaves(first[1]), strict=True)
            ),
        }
        for name in steps
    }


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write everything that was measured")
    parser.add_argument("--quick", action="store_true", help="tiny shapes: does everything run?")
    options = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    model = Model(2, 64, 4, 2, 128) if options.quick else Model()
    report: dict[str, Any] = {
        "machine": machine.facts(),
        "device": jax.devices()[0].device_kind,
        "versions": machine.versions(),
        "model": dataclasses.asdict(model),
        "cases": {},
    }
    print(f"{'documents':<14}{'flashxla':>12}{'jax.nn':>12}{'ratio':>8}{'difference':>12}")
    for name, lens in (QUICK if options.quick else CASES).items():
        peer: Literal["xla", "cudnn"] = "cudnn" if on_gpu else "xla"
        row = measure(model, lens, {"flashxla": flashxla(lens), peer: padded(lens, peer)})
        report["cases"][name] = {"lens": lens, **row}
        ours, theirs = row["flashxla"]["seconds"], row[peer]["seconds"]
        error = row[peer]["gradient_error"]
        print(
            f"{name:<14}{ours * 1e3:>9.2f} ms{theirs * 1e3:>9.2f} ms{theirs / ours:>8.2f}{error:>12.1e}",
            flush=True,
        )
    if options.json:
        output_file.write_json(options.json, report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
