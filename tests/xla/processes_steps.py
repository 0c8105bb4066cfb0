"""One of two processes of a JAX program: heads over both; run by test_processes.py.

python -m tests.xla.processes_steps ADDRESS NUMBER
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flashxla import jax as fx
from tests import reference

TOKENS, HEADS, KV_HEADS, DIM, PAGES, PAGE = 5, 4, 2, 16, 16, 4


def main(address: str, number: int) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, number)
    assert jax.process_count() == 2 and jax.device_count() == 2 and jax.local_device_count() == 1
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)  # the same in both

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    def put(x: Any, *spec: Any) -> jax.Array:
        sharding = NamedSharding(mesh, P(*spec))
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    def close(got: jax.Array, expected: np.ndarray) -> None:
        """Of the part that this process has."""
        for shard in got.addressable_shards:
            np.testing.assert_allclose(shard.data, expected[shard.index], rtol=2e-5, atol=2e-5)

    query, key, value = (
        normal(TOKENS, HEADS, DIM),
        normal(TOKENS, KV_HEADS, DIM),
        normal(TOKENS, KV_HEADS, DIM),
    )
    caches = normal(PAGES, PAGE, KV_HEADS, DIM), normal(PAGES, PAGE, KV_HEADS, DIM)
    table = rng.permutation(PAGES)[:4].reshape(2, 2).astype(np.int32)
    lens, starts, count = np.array([7, 2], np.int32), np.array([0, 3, 5], np.int32), np.array([2], np.int32)
    index, weights = (lens, table, starts, count), normal(HEADS * DIM, 8)

    def step(query: Any, key: Any, value: Any, k: Any, v: Any, weights: Any) -> Any:
        out, (k, v) = fx.ragged_paged_attention(query, key, value, (k, v), *index, 0.25)
        return out.reshape(TOKENS, -1) @ weights, k, v  # a sum over the heads of both processes

    heads, cached = (None, "x"), (None, None, "x")
    given = (
        *(put(x, *heads) for x in (query, key, value)),
        *(put(x, *cached) for x in caches),
        put(weights, "x"),
    )
    program = jax.jit(step, donate_argnums=(3, 4)).lower(*given).compile()
    text = program.as_text()
    assert "all-gather" not in text and "all-to-all" not in text and "all-reduce" in text
    out, k, v = program(*given)
    want, _, (want_k, want_v) = reference.ragged_paged_attention(query, key, value, caches, *index, 0.25)
    close(out, want.reshape(TOKENS, -1) @ weights)
    close(k, want_k)
    close(v, want_v)

    # The keys go around a ring of both processes.
    order = fx.ring_order(8, 2)
    q, kv, offsets = normal(8, HEADS, DIM), normal(8, KV_HEADS, DIM), np.array([0, 5, 8], np.int32)
    ring = jax.shard_map(
        lambda q, kv: fx.ring_attention(q, kv, kv, jnp.asarray(offsets), 8, axis_name="x"),
        mesh=mesh,
        in_specs=(P("x"), P("x")),
        out_specs=P("x"),
    )
    got = jax.jit(ring)(put(q[order], "x"), put(kv[order], "x"))
    expected, _ = reference.flash_attn_varlen_func(q, kv, kv, 8, offsets, 8, offsets, causal=True)
    close(got, expected[order])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
