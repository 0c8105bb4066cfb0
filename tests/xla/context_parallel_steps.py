"""Ring attention and merged decoding over all devices against one device; run by test_context_parallel.py.

python -m tests.xla.context_parallel_steps
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flashxla import jax as fx

COUNT = jax.device_count()
MESH = jax.make_mesh((COUNT,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
RNG = np.random.default_rng()
TOKENS, HEADS, KV_HEADS, DIM = 16 * COUNT, 4, 2, 16


def normal(*shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape, np.float32), dtype)


def put(x: Any, spec: P) -> jax.Array:
    return jax.device_put(x, NamedSharding(MESH, spec))


def documents() -> list[list[int]]:
    """Offsets: one document, several, some empty, and fewer tokens than there is room for."""
    cuts = np.sort(RNG.integers(0, TOKENS, 5)).tolist()
    return [[0, TOKENS], [0, *cuts, TOKENS], [0, 3, 3, 3, TOKENS // 2, TOKENS - 5], [2, 9, TOKENS]]


def check_ring(offsets: list[int], dtype: str, check_vma: bool, **options: Any) -> None:
    order = fx.ring_order(TOKENS, COUNT)
    back = np.argsort(order)
    q, k, v = (normal(TOKENS, heads, DIM, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    weights = normal(TOKENS, HEADS, DIM), normal(HEADS, TOKENS)
    cu_seqlens = jnp.asarray(offsets, jnp.int32)
    inside = np.zeros(TOKENS, bool)
    inside[offsets[0] : offsets[-1]] = True

    longest = max(np.diff(offsets).max(initial=0), 1)  # no bound is looser than it must be
    q, k, v = (x.at[~inside].set(jnp.nan) for x in (q, k, v))
    weights = (weights[0].at[~inside].set(0.0), weights[1])

    def of_one(q: Any, k: Any, v: Any) -> Any:
        return fx.flash_attn_varlen_func(
            q, k, v, longest, cu_seqlens, longest, cu_seqlens, causal=True, return_softmax_lse=True, **options
        )

    sharded, of_heads = P("context"), P(None, "context")
    ring = jax.shard_map(
        functools.partial(
            fx.ring_attention, max_seqlen=longest, axis_name="context", return_softmax_lse=True, **options
        ),
        mesh=MESH,
        in_specs=(sharded, sharded, sharded, P()),
        out_specs=(sharded, of_heads),
        check_vma=check_vma,
    )

    def of_ring(q: Any, k: Any, v: Any) -> Any:
        return ring(q, k, v, cu_seqlens)

    def loss(function: Any, weights: Any, inside: Any, *sources: Any) -> Any:
        out, lse = function(*sources)
        lse = jnp.where(inside, lse, 0.0)
        return (out * weights[0]).sum() + (lse * weights[1]).sum()

    def gradients(function: Any, weights: Any, inside: Any) -> Any:
        return jax.jit(jax.value_and_grad(functools.partial(loss, function, weights, inside), (0, 1, 2)))

    ordered = [put(x[order], sharded) for x in (q, k, v)]
    program = gradients(of_ring, (weights[0][order], weights[1][:, order]), inside[order])
    text = program.lower(*ordered).compile().as_text()
    assert "collective-permute" in text
    assert "all-gather" not in text, "keys are gathered"
    out, lse = jax.jit(of_ring)(*ordered)
    expected_out, expected_lse = of_one(q, k, v)
    value, grads = program(*ordered)
    expected_value, expected_grads = gradients(of_one, weights, inside)(q, k, v)
    close = functools.partial(assert_close, dtype)
    close(out[back], expected_out)
    close(lse[:, back], expected_lse)
    # The loss is a sum of terms of both signs: its error is measured against their sizes.
    sizes = loss(
        lambda: (jnp.abs(expected_out), jnp.abs(expected_lse)), jax.tree.map(jnp.abs, weights), inside
    )
    close(value / sizes, expected_value / sizes)
    for got, expected in zip(grads, expected_grads, strict=True):
        close(got[back], expected)


def assert_close(dtype: str, got: Any, expected: Any) -> None:
    tolerance = {"float32": 2e-5, "bfloat16": 3e-2}[dtype]
    expected = np.asarray(expected, np.float64)
    largest = np.abs(expected, where=np.isfinite(expected), out=np.zeros_like(expected)).max(initial=1.0)
    np.testing.assert_allclose(
        np.asarray(got, np.float64), expected, rtol=tolerance, atol=tolerance * largest
    )


def check_heads() -> None:
    """Heads over the devices: gradients, also of keys that all heads share, under check_vma."""
    q, k, v = (normal(TOKENS, heads, DIM) for heads in (HEADS, 1, 1))
    sinks, weights = normal(HEADS), normal(TOKENS, HEADS, DIM)
    offsets = jnp.array([0, 5, TOKENS], jnp.int32)

    def attend(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return fx.flash_attn_varlen_func(q, k, v, TOKENS, offsets, TOKENS, offsets, causal=True, s_aux=sinks)

    of_heads = P(None, "context")
    sharded = jax.shard_map(
        attend, mesh=MESH, in_specs=(of_heads, P(), P(), P("context")), out_specs=of_heads
    )
    gradients = [
        jax.jit(jax.grad(lambda *sources, f=f: (f(*sources) * weights).sum(), (0, 1, 2, 3)))(q, k, v, sinks)
        for f in (sharded, attend)
    ]
    for got, expected in zip(*gradients, strict=True):
        assert_close("float32", got, expected)


def check_merging() -> None:
    """Gradients through the merge of what the devices found in their own keys."""
    q, k, v = normal(6, HEADS, DIM), normal(TOKENS, KV_HEADS, DIM), normal(TOKENS, KV_HEADS, DIM)
    weights = normal(6, HEADS, DIM), normal(HEADS, 6)

    def attend(q: Any, k: Any, v: Any) -> Any:
        ends = (jnp.array([0, n], jnp.int32) for n in (len(q), len(k)))
        cu_seqlens_q, cu_seqlens_k = ends
        return fx.flash_attn_varlen_func(
            q, k, v, len(q), cu_seqlens_q, len(k), cu_seqlens_k, return_softmax_lse=True
        )

    def merged(q: Any, k: Any, v: Any) -> Any:
        return fx.merge_attn_states_over(*attend(q, k, v), "context")

    of_keys = P("context")
    sharded = jax.shard_map(merged, mesh=MESH, in_specs=(P(), of_keys, of_keys), out_specs=(P(), P()))

    def loss(function: Any, *sources: Any) -> Any:
        return sum((x * w).sum() for x, w in zip(function(*sources), weights, strict=True))

    gradients = [jax.jit(jax.grad(functools.partial(loss, f), (0, 1, 2)))(q, k, v) for f in (sharded, attend)]
    for got, expected in zip(*gradients, strict=True):
        assert_close("float32", got, expected)


def check_empty_parts(mark: float) -> None:
    """Parts that their LSE marks as empty, whatever their out holds: as merge_attn_states, and with gradients."""
    outs, lses = normal(COUNT, 6, HEADS, DIM), normal(COUNT, HEADS, 6)
    empty = np.zeros((COUNT, HEADS, 6), bool)
    empty[0] = True
    empty[1, 1, 2:4] = True  # with two devices, of these there is no part
    outs = jnp.where(empty.swapaxes(1, 2)[..., None], jnp.nan, outs)
    lses = jnp.where(empty, mark, lses)

    def merged(out: Any, lse: Any) -> Any:
        return fx.merge_attn_states_over(out[0], lse[0], "context")

    parts = P("context")
    sharded = jax.shard_map(merged, mesh=MESH, in_specs=(parts, parts), out_specs=(P(), P()))
    out, lse = jax.jit(sharded)(outs, lses)
    expected_out, expected_lse = fx.merge_all_attn_states(list(outs), list(lses))
    assert_close("float32", out, expected_out)
    assert_close("float32", lse, expected_lse)

    def loss(outs: Any, lses: Any) -> Any:
        out, lse = sharded(outs, lses)
        return out.sum() + jnp.where(jnp.isfinite(lse), lse, 0.0).sum()

    of_outs, of_lses = jax.jit(jax.grad(loss, (0, 1)))(outs, lses)
    assert jnp.isfinite(of_outs).all() and jnp.isfinite(of_lses).all()
    assert not of_lses[empty].any() and of_lses[~empty].any()


def check_decoding() -> None:
    """Each device has some pages of each sequence."""
    sequences, pages, page = 3, 2, 4
    query = normal(sequences, HEADS, DIM)
    caches = [normal(COUNT * pages * sequences, page, KV_HEADS, DIM) for _ in "kv"]
    table = jnp.arange(COUNT * sequences * pages, dtype=jnp.int32).reshape(COUNT, sequences, pages)
    lens = jnp.asarray(RNG.integers(0, pages * page + 1, (COUNT, sequences)), jnp.int32)
    lens = lens.at[:, 0].set(0)  # a sequence without any key
    starts, count = jnp.arange(sequences + 1, dtype=jnp.int32), jnp.array([sequences], jnp.int32)

    def step(query: Any, k: Any, v: Any, table: Any, lens: Any) -> Any:
        first = jax.lax.axis_index("context") * sequences * pages
        out, lse = fx.paged_attention(
            query, (k, v), lens[0], table[0] - first, starts, count, 0.25, return_softmax_lse=True
        )
        return fx.merge_attn_states_over(out, lse, "context")

    sharded = P("context")
    program = jax.shard_map(
        step, mesh=MESH, in_specs=(P(), *[sharded] * 4), out_specs=(P(), P()), check_vma=False
    )
    out, lse = jax.jit(program)(query, *(put(x, sharded) for x in (*caches, table, lens)))
    rows = [
        np.concatenate(
            [
                np.asarray(c)[np.asarray(table[d, s])].reshape(-1, KV_HEADS, DIM)[: lens[d, s]]
                for d in range(COUNT)
            ]
        )
        for s in range(sequences)
        for c in caches
    ]
    keys, values = (jnp.asarray(np.concatenate(rows[i::2])) for i in range(2))
    offsets = jnp.asarray(np.cumsum([0, *lens.sum(0).tolist()]), jnp.int32)
    expected = fx.flash_attn_varlen_func(
        query, keys, values, 1, starts, TOKENS, offsets, softmax_scale=0.25, return_softmax_lse=True
    )
    for got, want in zip((out, lse), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    assert COUNT > 1
    for number, offsets in enumerate(documents()):
        check_ring(offsets, "float32", check_vma=number % 2 == 0)
    several = documents()[1]
    check_ring(several, "bfloat16", check_vma=True)
    check_ring(several, "float32", check_vma=True, window_size=(11, -1), softcap=3.0, softmax_scale=0.3)
    check_heads()
    check_ring(several, "float32", check_vma=False, window_size=(0, 0), deterministic=True)
    with jax.enable_x64(True):
        check_ring(several, "float32", check_vma=True)
    check_merging()
    check_empty_parts(-jnp.inf)
    check_empty_parts(jnp.inf)
    check_decoding()
