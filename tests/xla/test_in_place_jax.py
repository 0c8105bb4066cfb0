"""The functional ops in JAX: with donation the new cache is the old buffer, in loops and scans too."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flashxla.jax as fx
from flashxla.doctor import hlo

L, P, B, H, D = 3, 64, 16, 2, 64
SLOTS = jnp.array([0, 1, B + 1, -1], jnp.int32)
META = (
    jnp.array([2, 1, 1], jnp.int32),
    jnp.array([[0], [1], [2]], jnp.int32),
    jnp.array([0, 2, 3, 4], jnp.int32),
    jnp.array([3], jnp.int32),
)
KEY = jnp.asarray(np.random.default_rng(0).standard_normal((4, H, D), dtype=np.float32))
QUERY = jnp.asarray(np.random.default_rng(1).standard_normal((4, 2 * H, D), dtype=np.float32))
CACHE_BYTES = P * B * H * D * 4


def layer(
    query: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array = SLOTS, first_block: Any = 0
) -> tuple:
    k, v = fx.reshape_and_cache_flash(query[:, :H] + KEY, KEY, k, v, slots)
    lengths, tables, starts, num_seqs = META
    query = fx.paged_attention(query, (k, v), lengths, tables + first_block, starts, num_seqs, D**-0.5)
    return query, k, v


def layers(query: jax.Array, caches: list) -> tuple[jax.Array, list]:
    new = []
    for k, v in caches:
        query, k, v = layer(query, k, v)
        new.append((k, v))
    return query, new


def fused(query: jax.Array, caches: list, slots: jax.Array | None = None) -> tuple[jax.Array, list]:
    """The layers with one call each."""
    new = []
    for cache in caches:
        key = query[:, :H] + KEY
        query, cache = fx.ragged_paged_attention(query, key, KEY, cache, *META, D**-0.5, slot_mapping=slots)
        new.append(cache)
    return query, new


def fused_loop(query: jax.Array, caches: list) -> tuple[jax.Array, list]:
    return jax.lax.fori_loop(0, 5, lambda _, state: fused(*state), (query, caches))


def one_tensor_caches() -> list:
    return [jnp.zeros((P, B, 2 * H, D)) for _ in range(L)]


def caches() -> list:
    return [(jnp.zeros((P, B, H, D)), jnp.zeros((P, B, H, D))) for _ in range(L)]


def loop(query: jax.Array, caches: list) -> tuple[jax.Array, list]:
    return jax.lax.fori_loop(0, 5, lambda _, state: layers(*state), (query, caches))


def scan(query: jax.Array, pool: tuple) -> tuple:
    """Layers under scan: one flat pool as the carry, the layer's offset added to slots and tables."""

    def body(state: tuple, index: jax.Array) -> tuple:
        query, (k, v) = state
        slots = jnp.where(SLOTS < 0, -1, SLOTS + index * P * B)
        query, k, v = layer(query, k, v, slots, index * P)
        return (query, (k, v)), None

    return jax.lax.scan(body, (query, pool), jnp.arange(L, dtype=jnp.int32))[0]


def pool() -> tuple:
    return jnp.zeros((L * P, B, H, D)), jnp.zeros((L * P, B, H, D))


@pytest.mark.parametrize(
    ("function", "make"),
    [
        *((layers, caches), (loop, caches), (scan, pool)),
        *((fused, caches), (fused, one_tensor_caches), (fused_loop, caches)),
    ],
)
def test_donated_caches_are_never_copied(function: Any, make: Any) -> None:
    held = make()
    compiled = jax.jit(function, donate_argnums=1).lower(QUERY, held).compile()
    assert hlo.Program("", compiled.as_text(), 0).copies(at_least=CACHE_BYTES) == []
    assert compiled.memory_analysis().temp_size_in_bytes < CACHE_BYTES
    before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(held)]
    for _ in range(3):
        _, held = compiled(QUERY, held)
        assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(held)] == before


@pytest.mark.parametrize(("make", "aliased"), [(caches, 2), (one_tensor_caches, 1)])
def test_write_and_attend_is_one_aliased_call(make: Any, aliased: int) -> None:
    text = jax.jit(fused, donate_argnums=1).lower(QUERY, make()).compile().as_text()
    calls = [line for line in text.splitlines() if 'custom_call_target="flashxla_attention"' in line]
    assert len(calls) == L and "flashxla_kv_cache" not in text
    for call in calls:
        aliases = call.partition("output_to_operand_aliasing=")[2]
        assert len(re.findall(r"\{\d+\}: \(\d+, \{\}\)", aliases)) == aliased, call


def test_write_and_attend_equals_layers() -> None:
    out, new = layers(QUERY, caches())
    fused_out, fused_new = fused(QUERY, caches(), SLOTS)
    np.testing.assert_array_equal(fused_out, out)
    for x, y in zip(jax.tree.leaves(fused_new), jax.tree.leaves(new), strict=True):
        np.testing.assert_array_equal(x, y)


def test_scan_equals_layers() -> None:
    out, new = layers(QUERY, caches())
    scanned, (k, v) = scan(QUERY, pool())
    np.testing.assert_allclose(scanned, out, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(k, jnp.concatenate([k for k, _ in new]))
    np.testing.assert_array_equal(v, jnp.concatenate([v for _, v in new]))


@pytest.mark.parametrize("function", [layers, fused])
def test_without_donation_the_argument_is_left_alone(function: Any) -> None:
    held = caches()
    jax.jit(function)(QUERY, held)
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(held))


def test_slices_of_a_stacked_cache() -> None:
    """K and V as slices of one tensor, written back into it: copied, but right. XLA:GPU made a cycle of it."""

    def update(stacked: jax.Array) -> jax.Array:
        k, v = fx.reshape_and_cache_flash(KEY, -KEY, stacked[0], stacked[1], SLOTS)
        return stacked.at[0].set(k).at[1].set(v)

    written = jax.jit(update, donate_argnums=0)(jnp.zeros((2, P, B, H, D)))
    expected = fx.reshape_and_cache_flash(KEY, -KEY, *jnp.zeros((2, P, B, H, D)), SLOTS)
    np.testing.assert_array_equal(written, jnp.stack(expected))


def test_shard_map_over_heads(request: pytest.FixtureRequest) -> None:
    """Tensor parallel on four CPU devices, or all GPUs: caches sharded over KV heads, no gather in the program."""
    import os
    import subprocess
    import sys

    from flashxla.xla import gpu

    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if request.config.option.device == "cpu":
        environment.update(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=4")
    elif gpu.count(os.environ) < 2:
        pytest.skip("needs two GPUs")
    code = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P, NamedSharding
from flashxla import jax as fx
from flashxla.doctor import hlo
count = jax.device_count()
mesh = jax.make_mesh((count,), ("h",), axis_types=(jax.sharding.AxisType.Auto,))
r = np.random.default_rng(0)
q, kv = (jnp.asarray(r.standard_normal(s), jnp.float32) for s in ((6, 8, 32), (6, 4, 32)))
cache = jnp.zeros((8, 4, 4, 32))
slots, ns = jnp.arange(6), jnp.array([2], jnp.int32)
lens, table = jnp.array([3, 3], jnp.int32), jnp.array([[0, 1], [1, 0]], jnp.int32)
starts = jnp.array([0, 3, 6], jnp.int32)
def step(q, kv, k, v):
    k, v = fx.reshape_and_cache_flash(kv, kv, k, v, slots)
    return fx.paged_attention(q, (k, v), lens, table, starts, ns, 0.2), k, v
heads, cached = P(None, "h"), P(None, None, "h")
sharded = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(heads, heads, cached, cached),
                                out_specs=(heads, cached, cached), check_vma=False), donate_argnums=(2, 3))
put = lambda x, s: jax.device_put(x, NamedSharding(mesh, s))
args = put(q, heads), put(kv, heads), put(cache, cached), put(cache, cached)
text = sharded.lower(*args).compile().as_text()
assert count > 1 and "all-gather" not in text, text
assert not hlo.Program("step", text, 0).copies(at_least=cache.nbytes // count), text
out, k, v = sharded(*args)
want = step(q, kv, cache, cache)
for got, expected in zip((out, k, v), want):
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_export_round_trip() -> None:
    pytest.importorskip("flatbuffers")
    from jax import export

    exported = export.export(jax.jit(layers), disabled_checks=fx.export_checks())(QUERY, caches())
    call = jax.jit(export.deserialize(exported.serialize()).call, donate_argnums=1)
    held = caches()
    before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(held)]
    out, held = call(QUERY, held)
    np.testing.assert_array_equal(out, layers(QUERY, caches())[0])
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(held)] == before
