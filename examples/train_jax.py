"""Train a small Llama on packed documents in JAX, over a mesh of devices.

    python examples/train_jax.py
    XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/train_jax.py --mesh 2 2 2

The mesh has three axes. data: rows of a batch, and each matrix in parts (FSDP). tensor: heads and the feed-forward
part. context: the tokens of a row; their keys go around the ring. With --checkpoint a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flashxla import jax as fx

from packed_documents import VOCABULARY, Batch, batches  # isort: skip  (a file beside this one)

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Config:
    """The model's shape."""

    width: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    feed_forward: int = 384

    @property
    def dim(self) -> int:
        """Of a head."""
        return self.width // self.heads


def shapes(config: Config) -> dict[str, tuple[tuple[int, ...], P]]:
    """Of each weight its shape and how it is sharded. Layers are stacked, for a scan."""
    layers, width, dim = config.layers, config.width, config.dim
    up = P(None, "data", "tensor")  # whose results are heads or hidden units
    down = P(None, "tensor", "data")
    return {
        "embed": ((VOCABULARY, width), P(None, "data")),
        "norm": ((width,), P()),
        "norm_1": ((layers, width), P()),
        "norm_2": ((layers, width), P()),
        "q": ((layers, width, config.heads * dim), up),
        "k": ((layers, width, config.kv_heads * dim), up),
        "v": ((layers, width, config.kv_heads * dim), up),
        "o": ((layers, width, width), down),
        "gate": ((layers, width, config.feed_forward), up),
        "up": ((layers, width, config.feed_forward), up),
        "down": ((layers, config.feed_forward, width), down),
    }


def initial(config: Config, mesh: jax.sharding.Mesh, seed: int) -> Params:
    """Random weights, each made where it stays."""
    params = {}
    for number, (name, (shape, spec)) in enumerate(shapes(config).items()):
        key = jax.random.fold_in(jax.random.key(seed), number)
        scale = 0.02 if name == "embed" else shape[-2] ** -0.5 if len(shape) > 1 else 1.0

        def make(key: jax.Array, name: str = name, shape: Any = shape, scale: float = scale) -> jax.Array:
            return jnp.ones(shape) if "norm" in name else scale * jax.random.normal(key, shape)

        params[name] = jax.jit(make, out_shardings=NamedSharding(mesh, spec))(key)
    return params


def attention(mesh: jax.sharding.Mesh, q: jax.Array, k: jax.Array, v: jax.Array, batch: Batch) -> jax.Array:
    """q [B, T, Hq, D], k and v [B, T, Hk, D]; each device has some rows, tokens and heads."""
    tokens = q.shape[1]
    of_tokens, of_rows = P("data", "context", "tensor"), P("data")
    ring = mesh.shape["context"] > 1

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(of_tokens, of_tokens, of_tokens, of_rows), out_specs=of_tokens
    )
    def attend(q: jax.Array, k: jax.Array, v: jax.Array, cu_seqlens: jax.Array) -> jax.Array:
        if not ring:  # the rows become one row of more documents
            rows = jnp.arange(len(q), dtype=jnp.int32)[:, None] * tokens
            offsets = jnp.append((cu_seqlens[:, :-1] + rows).reshape(-1), len(q) * tokens).astype(jnp.int32)
            flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
            out = fx.flash_attn_varlen_func(
                flat[0],
                flat[1],
                flat[2],
                cu_seqlens_q=offsets,
                cu_seqlens_k=offsets,
                max_seqlen_q=tokens,
                max_seqlen_k=tokens,
                causal=True,
            )
            return out.reshape(q.shape)
        rows_out = [
            fx.ring_attention(*row, max_seqlen=tokens, axis_name="context")
            for row in zip(q, k, v, cu_seqlens, strict=True)
        ]
        return jnp.stack(rows_out)

    return attend(q, k, v, batch.cu_seqlens)


def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Root mean square."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * weight


def rotated(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary positions, of x [B, T, H, D] at positions [B, T]."""
    frequencies = 10000.0 ** (-jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
    angles = (positions[:, :, None] * frequencies)[:, :, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def loss_of(config: Config, mesh: jax.sharding.Mesh, params: Params, batch: Batch) -> jax.Array:
    """The mean loss of the tokens that have a target, in nats."""

    @jax.checkpoint
    def layer(x: jax.Array, weights: Params) -> tuple[jax.Array, None]:
        normed = norm(x, weights["norm_1"])
        q, k, v = ((normed @ weights[name]).reshape(*x.shape[:2], -1, config.dim) for name in "qkv")
        out = attention(mesh, rotated(q, batch.positions), rotated(k, batch.positions), v, batch)
        x = x + out.reshape(x.shape) @ weights["o"]
        normed = norm(x, weights["norm_2"])
        hidden = jax.nn.silu(normed @ weights["gate"]) * (normed @ weights["up"])
        return x + hidden @ weights["down"], None

    stacked = {name: x for name, x in params.items() if name not in ("embed", "norm")}
    x, _ = jax.lax.scan(layer, params["embed"][batch.tokens], stacked)
    logits = norm(x, params["norm"]) @ params["embed"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(batch.targets, 0))
    counts = batch.targets >= 0
    return (losses * counts).sum() / counts.sum()


def placed(mesh: jax.sharding.Mesh, batch: Batch) -> Batch:
    """A batch on the devices; tokens in the order in which each gets as much work as the others."""
    order = fx.ring_order(batch.tokens.shape[1], mesh.shape["context"])

    def put(x: np.ndarray, spec: P) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, spec))

    def of_tokens(x: np.ndarray) -> jax.Array:
        return put(x[:, order], P("data", "context"))

    return Batch(
        of_tokens(batch.tokens),
        of_tokens(batch.targets),
        of_tokens(batch.positions),
        put(batch.cu_seqlens, P("data")),
    )


def main() -> None:
    """Train, and print the loss."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mesh", type=int, nargs=3, default=(1, 1, 1), metavar=("DATA", "TENSOR", "CONTEXT"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=4, help="of a batch")
    parser.add_argument("--tokens", type=int, default=512, help="of a row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FOLDER", help="save there at the end, and go on from there"
    )
    args = parser.parse_args()

    config = Config()
    axes = ("data", "tensor", "context")
    mesh = jax.make_mesh(tuple(args.mesh), axes, axis_types=(jax.sharding.AxisType.Auto,) * 3)
    optimizer = optax.adamw(3e-3, b2=0.98)
    params = initial(config, mesh, args.seed)
    # Moments are sharded as their weights are; the counter is on every device.
    moments = jax.tree.map(
        lambda x: x if x.ndim else jax.device_put(x, NamedSharding(mesh, P())), optimizer.init(params)
    )
    state = (params, moments)
    first = 0
    if args.checkpoint:
        import orbax.checkpoint as ocp

        manager = ocp.CheckpointManager(args.checkpoint.resolve())
        if manager.latest_step() is not None:
            first = manager.latest_step()
            state = manager.restore(first, args=ocp.args.StandardRestore(state))

    @functools.partial(jax.jit, donate_argnums=0)
    def train(state: Any, batch: Batch) -> tuple[Any, jax.Array]:
        params, moments = state
        loss, gradients = jax.value_and_grad(functools.partial(loss_of, config, mesh))(params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    started = time.monotonic()
    data = itertools.islice(batches(args.rows, args.tokens, args.seed), first, args.steps)
    for step, batch in enumerate(data, first):
        state, loss = train(state, placed(mesh, batch))
        if step % 10 == 0 or step == args.steps - 1:
            speed = (step + 1 - first) * args.rows * args.tokens / (time.monotonic() - started)
            print(f"step {step}  loss {loss:.3f}  {speed:,.0f} tokens/s", flush=True)
    if args.checkpoint:
        manager.save(args.steps, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        manager.close()


if __name__ == "__main__":
    jax.tree_util.register_dataclass(Batch, [f.name for f in dataclasses.fields(Batch)], [])
    main()
