"""Calls under jit on sharded arguments, against one device; run by test_sharding.py on four devices.

python -m tests.xla.sharding_steps PART auto|explicit SEED. On two devices the mesh's second axis has no parts.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flashxla import jax as fx
from flashxla.doctor import hlo
from tests import reference

EXPLICIT = sys.argv[2] == "explicit"
KIND = AxisType.Explicit if EXPLICIT else AxisType.Auto
MESH = jax.make_mesh((2, jax.device_count() // 2), ("a", "b"), axis_types=(KIND, KIND))
RNG = np.random.default_rng(int(sys.argv[3]))
TOKENS, HEADS, KV_HEADS, DIM, PAGES, PAGE, TABLE = 6, 8, 4, 16, 64, 8, 2
# The collectives of a program, and what each makes.
MADE = re.compile(r"= \(?\w+\[([\d,]*)\][^=]* (?:all-|collective-|reduce-scatter)[\w-]*\(")
MOVES = re.compile(r"\b(all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)(?:-start)?\(")
BOTH = ("a", "b") if MESH.shape["b"] > 1 else "a"


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


LENS, STARTS, COUNT = np.array([5, 11], np.int32), np.array([0, 3, 6], np.int32), np.array([2], np.int32)
PAGE_TABLE = RNG.permutation(PAGES)[: 2 * TABLE].reshape(2, TABLE).astype(np.int32)
SLOTS = RNG.permutation(PAGES * PAGE)[:TOKENS].astype(np.int32)
INDEX = (LENS, PAGE_TABLE, STARTS, COUNT)


def put(x: Any, spec: P) -> jax.Array:
    return jax.device_put(jnp.array(x), NamedSharding(MESH, spec))


def moves(compiled: Any) -> list[str]:
    return sorted(MOVES.findall(compiled.as_text()))


def close(got: Any, expected: Any, tolerance: float = 2e-5) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(
            x, y, rtol=tolerance, atol=tolerance * np.abs(y[np.isfinite(y)]).max(initial=1)
        )


def warned(function: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function()
    return result, [str(w.message) for w in caught if w.category.__name__ == "ShardingWarning"]


# Each layout of a cache: its shape, and its dimension of heads.
CACHES: dict[str, tuple[tuple[int, ...], int]] = {
    "NHD": ((PAGES, PAGE, KV_HEADS, DIM), 2),
    "HND": ((PAGES, KV_HEADS, PAGE, DIM), 1),
    "interleaved": ((PAGES, PAGE, 2 * KV_HEADS, DIM), 2),
    "packed_HND": ((PAGES, KV_HEADS, PAGE, 2 * DIM), 1),
    "packed_NHD": ((PAGES, PAGE, KV_HEADS, 2 * DIM), 2),
    "stacked": ((2, PAGES, PAGE, KV_HEADS, DIM), 3),
}


def check_decoding() -> None:
    """Write and attention, in two calls and in one, in every layout: in place, nothing moves, float64's numbers."""
    slopes, sinks = np.abs(normal(HEADS)), normal(HEADS)
    scale = np.abs(normal(KV_HEADS)) + 0.5
    for layout, (shape, heads) in CACHES.items():
        for fused in (False, True):
            pair = layout in ("NHD", "HND")
            caches = tuple(normal(*shape) for _ in range(2 if pair else 1))
            query, key, value = (
                normal(TOKENS, HEADS, DIM),
                normal(TOKENS, KV_HEADS, DIM),
                normal(TOKENS, KV_HEADS, DIM),
            )

            def step(
                query: Any, key: Any, value: Any, slopes: Any, sinks: Any, scale: Any, *caches: Any,
                fused: bool = fused, pair: bool = pair, layout: str = layout,
            ) -> Any:  # fmt: skip
                options = {
                    "alibi_slopes": slopes,
                    "s_aux": sinks,
                    "return_softmax_lse": True,
                    "layout": layout,
                }
                cache = caches if pair else caches[0]
                scales = {"k_scale": scale, "v_scale": scale}
                if fused:
                    return fx.ragged_paged_attention(
                        query, key, value, cache, *INDEX, 0.2, slot_mapping=SLOTS, **scales, **options
                    )
                if pair:
                    cache = fx.reshape_and_cache_flash(key, value, *caches, SLOTS, layout=layout)
                else:
                    cache = fx.reshape_and_cache(key, value, cache, SLOTS, layout)
                return *fx.paged_attention(query, cache, *INDEX, 0.2, **scales, **options), cache

            given = (query, key, value, slopes, sinks, scale, *caches)
            of_heads, cached = P(None, "a"), P(*[None] * heads, "a")
            specs = (of_heads, of_heads, of_heads, P("a"), P("a"), P("a"), *(cached for _ in caches))
            arrays = [put(x, s) for x, s in zip(given, specs, strict=True)]
            function = jax.jit(step, donate_argnums=tuple(range(6, len(given))))
            compiled, messages = warned(lambda f=function, a=arrays: f.lower(*a).compile())
            part = arrays[6].nbytes // 2
            assert moves(compiled) == [] and messages == [], (layout, messages)
            assert hlo.Program("", compiled.as_text(), 0).copies(at_least=part) == [], layout
            assert compiled.memory_analysis().temp_size_in_bytes < part, layout
            before = [s.data.unsafe_buffer_pointer() for x in arrays[6:] for s in x.addressable_shards]
            out, lse, new = function(*arrays)
            new = new if pair else (new,)
            assert before == [s.data.unsafe_buffer_pointer() for x in new for s in x.addressable_shards], (
                layout
            )
            expected = reference.ragged_paged_attention(
                query, key, value, caches if pair else caches[0], *INDEX, 0.2, slot_mapping=SLOTS, layout=layout,
                k_scale=scale, v_scale=scale, alibi_slopes=slopes, s_aux=sinks,
            )  # fmt: skip
            close((out, lse, new), (expected[0], expected[1], expected[2] if pair else (expected[2],)))


def check_sharded_tokens() -> None:
    """Ragged tokens and sequences in parts: gathered, each with a warning, but the caches stay and are whole pages."""
    lens, starts = np.array([9, 1, 16, 5], np.int32), np.array([0, 1, 4, 5, 6], np.int32)
    count, table = np.array([4], np.int32), RNG.permutation(PAGES)[:8].reshape(4, TABLE).astype(np.int32)
    query, key = normal(TOKENS, HEADS, DIM), normal(TOKENS, KV_HEADS, DIM)
    caches = [normal(PAGES, PAGE, KV_HEADS, DIM) for _ in "kv"]

    def step(query: Any, key: Any, lens: Any, table: Any, k: Any, v: Any) -> Any:
        return fx.ragged_paged_attention(query, key, key, (k, v), lens, table, starts, count, 0.2)

    given = (query, key, lens, table, *caches)
    tokens, cached = P("a", "b"), P(None, None, "b")
    specs = (tokens, tokens, P("a"), P("a"), cached, cached)
    arrays = [put(x, s) for x, s in zip(given, specs, strict=True)]
    function = jax.jit(step, donate_argnums=(4, 5))
    compiled, messages = warned(lambda: function.lower(*arrays).compile())
    names = ["query", "key", "value", "context_lens", "block_tables"]
    assert [m.split()[1] for m in messages] == names, messages
    assert all("in 2 parts, which the call cannot keep" in m and "jax.vmap" in m for m in messages), messages
    part = arrays[4].nbytes // 2
    made = [4 * np.prod([int(n) for n in m.split(",") if n]) for m in MADE.findall(compiled.as_text())]
    assert len(made) == len(moves(compiled)) > 0 and max(made) < part, made
    assert compiled.memory_analysis().temp_size_in_bytes < part
    before = [s.data.unsafe_buffer_pointer() for x in arrays[4:] for s in x.addressable_shards]
    out, new = function(*arrays)
    assert before == [s.data.unsafe_buffer_pointer() for x in new for s in x.addressable_shards]
    close((out, new), step(*given))


def check_replicas() -> None:
    """What such a batch is for: parts with sequences and pages of their own, in jax.shard_map, by their own numbers."""
    replicas, sequences, pages = 2, 3, PAGES // 2
    lens, starts = (
        np.array([[5, 11, 3], [1, 16, 8]], np.int32),
        np.array([[0, 3, 4, 6], [0, 1, 2, 2]], np.int32),
    )
    count = np.array([3, 2], np.int32)
    table = np.stack([RNG.permutation(pages)[: sequences * TABLE] for _ in range(replicas)]).astype(np.int32)
    query, key = normal(replicas * TOKENS, HEADS, DIM), normal(replicas * TOKENS, KV_HEADS, DIM)
    k, v = (normal(PAGES, PAGE, KV_HEADS, DIM) for _ in "kv")
    index = (lens.reshape(-1), table.reshape(-1, TABLE), starts.reshape(-1), count)

    def step(query: Any, key: Any, k: Any, v: Any, *index: Any) -> Any:
        return fx.ragged_paged_attention(query, key, key, (k, v), *index, 0.2)

    tokens, cached = P("a", "b"), P("a", None, "b")
    specs = (tokens, tokens, cached, cached, P("a"), P("a"), P("a"), P("a"))
    arrays = [put(x, s) for x, s in zip((query, key, k, v, *index), specs, strict=True)]
    mapped = jax.shard_map(step, mesh=MESH, in_specs=specs, out_specs=(tokens, (cached, cached)))
    function = jax.jit(mapped, donate_argnums=(2, 3))
    compiled, messages = warned(lambda: function.lower(*arrays).compile())
    assert moves(compiled) == [] and messages == [], messages
    assert hlo.Program("", compiled.as_text(), 0).copies(at_least=k.nbytes // 4) == []
    got = function(*arrays)
    of_each = [
        step(*(np.array_split(x, replicas)[i] for x in (query, key, k, v, *index))) for i in range(replicas)
    ]
    close(got, jax.tree.map(lambda *parts: np.concatenate(parts), *of_each))


def check_scan() -> None:
    """Layers under scan, the caches its carry."""
    layers = 3
    query, key = normal(TOKENS, HEADS, DIM), normal(TOKENS, KV_HEADS, DIM)
    pool = normal(layers * PAGES, PAGE, KV_HEADS, DIM)

    def step(query: Any, key: Any, k: Any, v: Any) -> Any:
        def body(state: Any, i: Any) -> Any:
            query, k, v = state
            k, v = fx.reshape_and_cache_flash(key, key, k, v, SLOTS + i * PAGES * PAGE)
            query = fx.paged_attention(query, (k, v), LENS, PAGE_TABLE + i * PAGES, STARTS, COUNT, 0.2)
            return (query, k, v), None

        return jax.lax.scan(body, (query, k, v), jnp.arange(layers, dtype=jnp.int32))[0]

    heads, cached = P(None, "a"), P(None, None, "a")
    arrays = [
        put(x, s) for x, s in zip((query, key, pool, pool), (heads, heads, cached, cached), strict=True)
    ]
    function = jax.jit(step, donate_argnums=(2, 3))
    compiled = function.lower(*arrays).compile()
    part = pool.nbytes // 2
    assert moves(compiled) == [] and compiled.memory_analysis().temp_size_in_bytes < part
    assert hlo.Program("", compiled.as_text(), 0).copies(at_least=part) == []
    close(function(*arrays), step(query, key, pool, pool))


def check_gradients() -> None:
    """Of heads in parts, also of keys that several devices have in common, and of sequences."""
    heads, both, one = P(None, "a"), P(None, BOTH), P()
    # query heads, KV heads, how queries and keys are sharded, and whether nothing may be gathered.
    table = [
        (8, 4, heads, heads, True),
        (8, 4, both, both, True),
        (8, 2, both, heads, True),
        (8, 1, both, one, True),
        (8, 1, P(None, "b"), one, True),
        (6, 3, heads, one, False),
        (8, 4, P("a"), P("a"), False),
    ]
    for query_heads, kv_heads, spec, key_spec, stays in table:
        q, weights = normal(TOKENS, query_heads, DIM), normal(TOKENS, query_heads, DIM)
        k, v, sinks = normal(TOKENS, kv_heads, DIM), normal(TOKENS, kv_heads, DIM), normal(query_heads)
        of_head = P(*spec[1:]) if len(spec) > 1 else P()

        @jax.checkpoint
        def loss(q: Any, k: Any, v: Any, sinks: Any, weights: Any) -> Any:
            out, lse = fx.flash_attn_varlen_func(
                q, k, v, 6, STARTS, 6, STARTS, causal=True, s_aux=sinks, return_softmax_lse=True
            )
            return (out * weights).sum() + lse.sum()

        given = (q, k, v, sinks, weights)
        function = jax.jit(jax.grad(loss, (0, 1, 2, 3)))
        specs = (spec, key_spec, key_spec, of_head, spec)
        arrays = [put(x, s) for x, s in zip(given, specs, strict=True)]
        compiled = function.lower(*arrays).compile()
        assert not stays or set(moves(compiled)) <= {"all-reduce"}, (specs, moves(compiled))
        parts = [MESH.shape[axis] for axis in ("a", "b") if axis in str(spec)]
        shared = max(parts) > 1 and (kv_heads == 1 or spec != key_spec)
        assert not stays or ("all-reduce" in moves(compiled)) == shared, specs
        close(function(*arrays), jax.grad(loss, (0, 1, 2, 3))(*given))

    q, k, v, sinks = normal(4, 32, 4, DIM), normal(4, 32, 2, DIM), normal(4, 32, 2, DIM), normal(4)

    def of_batch(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        out, lse, _ = fx.flash_attn_func(q, k, v, causal=True, return_attn_probs=True, s_aux=sinks)
        return out, lse, out.sum() + lse.sum()

    function = jax.jit(jax.value_and_grad(lambda *x: of_batch(*x)[2], (0, 1, 2, 3)))
    arrays = [*(put(x, P("a", None, "b")) for x in (q, k, v)), put(sinks, P("b"))]
    assert set(moves(function.lower(*arrays).compile())) == {"all-reduce"}  # of the loss, and of sinks
    close(function(*arrays), function(q, k, v, sinks))
    assert moves(jax.jit(lambda *x: of_batch(*x)[:2]).lower(*arrays).compile()) == []


def check_vmap() -> None:
    """A batch over the devices: replicas, each with its own cache."""
    count = jax.device_count()
    query, key = normal(count, TOKENS, HEADS, DIM), normal(count, TOKENS, KV_HEADS, DIM)
    k, v = normal(count, PAGES, PAGE, KV_HEADS, DIM), normal(count, PAGES, PAGE, KV_HEADS, DIM)
    index = [np.stack([x] * count) for x in INDEX]

    def step(query: Any, key: Any, k: Any, v: Any, *index: Any) -> Any:
        return fx.ragged_paged_attention(query, key, key, (k, v), *index, 0.2)

    given = (query, key, k, v, *index)
    for spec, cached in ((P("a"), P("a")), (P(BOTH), P(BOTH)), (P("a", None, "b"), P("a", None, None, "b"))):
        specs = (spec, spec, cached, cached, *[P("a" if spec[0] == "a" else BOTH)] * 4)
        arrays = [put(x, s) for x, s in zip(given, specs, strict=True)]
        function = jax.jit(jax.vmap(step), donate_argnums=(2, 3))
        compiled, messages = warned(lambda f=function, a=arrays: f.lower(*a).compile())
        assert moves(compiled) == [] and messages == [], messages
        close(function(*arrays), jax.jit(jax.vmap(step))(*given))


def calls() -> dict[str, tuple[Callable[..., Any], Sequence[np.ndarray]]]:
    """Of each operation a function of arrays, and arrays whose sizes divide."""
    q, k, v = normal(8, HEADS, DIM), normal(8, KV_HEADS, DIM), normal(8, KV_HEADS, DIM)
    caches = normal(PAGES, PAGE, KV_HEADS, DIM), normal(PAGES, PAGE, KV_HEADS, DIM)
    lens = np.array([2, 9, 16, 5], np.int32)
    table = RNG.permutation(PAGES)[:8].reshape(4, 2).astype(np.int32)
    starts, count = np.array([0, 2, 3, 7, 8], np.int32), np.array([4], np.int32)
    slots = RNG.permutation(PAGES * PAGE)[:8].astype(np.int32)
    slopes, sinks, scales = np.abs(normal(4, HEADS)), normal(HEADS), np.abs(normal(4, KV_HEADS))

    def varlen(q: Any, k: Any, v: Any, starts: Any, slopes: Any, sinks: Any) -> Any:
        return fx.flash_attn_varlen_func(
            q,
            k,
            v,
            8,
            starts,
            8,
            starts,
            causal=True,
            alibi_slopes=slopes,
            s_aux=sinks,
            return_softmax_lse=True,
        )

    def paged(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        *index, slopes, sinks, scales = rest
        return fx.paged_attention(
            q, (k, v), *index, 0.2, k_scale=scales, alibi_slopes=slopes, s_aux=sinks, return_softmax_lse=True
        )

    def fused(q: Any, key: Any, k: Any, v: Any, *index: Any) -> Any:
        return fx.ragged_paged_attention(q, key, key, (k, v), *index, 0.2)

    def packed(qkv: Any, k: Any, v: Any, *index: Any) -> Any:
        return fx.ragged_paged_attention_qkvpacked(qkv, (k, v), *index, 0.2)

    index = (lens, table, starts, count)
    lse = normal(HEADS, 8)
    return {
        "varlen": (varlen, (q, k, v, starts, slopes, sinks)),
        "paged": (paged, (q, *caches, *index, slopes, sinks, scales)),
        "fused": (fused, (q, k, *caches, *index)),
        "packed": (packed, (np.concatenate([q, k, v], axis=1), *caches, *index)),
        "write": (fx.reshape_and_cache_flash, (k, v, *caches, slots)),
        "merge": (fx.merge_attn_states, (q, lse, 2 * q, lse[::-1].copy())),
    }


def random_spec(shape: tuple[int, ...]) -> P:
    """Each axis of the mesh over a random dimension that it divides, or over none."""
    axes: list[list[str]] = [[] for _ in shape]
    for axis in RNG.permutation(("a", "b")).tolist():
        dims = [i for i, size in enumerate(shape) if size % (2 * 2 ** len(axes[i])) == 0]
        if dims and RNG.random() < 0.6:
            axes[int(RNG.choice(dims))].append(axis)
    return P(*(tuple(a) or None for a in axes))


def check_random() -> None:
    """Whatever the arguments' shardings are, the result is one device's; and nothing moves without a warning."""
    for name, (function, given) in calls().items():
        expected = function(*given)
        for _ in range(3):
            specs = [random_spec(x.shape) for x in given]
            arrays = [put(x, s) for x, s in zip(given, specs, strict=True)]
            jitted = jax.jit(lambda *x, f=function: f(*x))
            compiled, messages = warned(lambda f=jitted, a=arrays: f.lower(*a).compile())
            close(jitted(*arrays), expected)
            assert messages or not moves(compiled), (name, specs, moves(compiled))


WARNINGS = [
    ("k", P("a"), "dimension 0 (pages), in 2 parts", "shard its dimension 2 (heads) instead"),
    ("k", P(None, None, None, "a"), "dimension 3 (head size), in 2 parts", "shard its dimension 2 (heads)"),
    ("q", P("a"), "dimension 0 (tokens), in 2 parts", "shard its dimension 1 (heads) instead"),
    ("q", P(None, BOTH), None, ""),  # each device has one KV head of two, and two query heads
    ("table", P("a"), "dimension 0 (sequences), in 2 parts", "replicate it"),
]


def check_warnings() -> None:
    """Of what cannot stay: the function, the argument, the dimension, how much moves, and what would help."""
    table = np.array([[0, 1], [2, 3]], np.int32)

    def attend(q: Any, k: Any, v: Any, table: Any) -> Any:
        return fx.paged_attention(q, (k, v), LENS, table, STARTS, COUNT, 0.2)

    given = {"q": normal(TOKENS, HEADS, DIM), "k": normal(4, PAGE, 2, DIM), "v": normal(4, PAGE, 2, DIM)}
    given["table"] = table
    names = {"q": "query", "k": "key_cache", "table": "block_tables"}
    expected = attend(*given.values())
    for argument, spec, where, advice in WARNINGS:
        heads = P(None, None, "a") if where is None else P()
        specs = {"q": P(), "k": heads, "v": heads, "table": P()} | {argument: spec}
        arrays = [put(x, specs[n]) for n, x in given.items()]
        compiled, messages = warned(lambda a=arrays: jax.jit(attend).lower(*a).compile())
        close(jax.jit(attend)(*arrays), expected)
        if where is None:
            assert not messages and not moves(compiled), messages
            continue
        (message,) = messages
        shape = ", ".join(map(str, given[argument].shape))
        start = f"paged_attention: {names[argument]} [{shape}] is sharded over its {where}, which the call cannot keep"
        assert message.startswith(start) and advice in message and moves(compiled), message
        assert f"{given[argument].nbytes} bytes are gathered" in message, message

    # A whole cache beside queries in parts: each device would copy its heads.
    arrays = [put(x, P(None, "a") if n == "q" else P()) for n, x in given.items()]
    _, messages = warned(lambda: jax.jit(attend).lower(*arrays).compile())
    assert len(messages) == 2 and all(
        "cache [4, 8, 2, 16] is whole in its dimension 2 (KV heads)" in m for m in messages
    )
    # Heads of three kinds.
    function, arguments = calls()["packed"]
    arrays = [put(arguments[0], P()), *(put(x, P(None, None, "a")) for x in arguments[1:3])]
    _, messages = warned(lambda: jax.jit(function).lower(*arrays, *arguments[3:]).compile())
    assert len(messages) == 2 and all(
        "(KV heads), in 2 parts, which the call cannot keep" in m for m in messages
    )
    # Heads that do not divide.
    three = [normal(TOKENS, 3, DIM), normal(TOKENS, 3, DIM), normal(TOKENS, 3, DIM)]
    q = put(normal(TOKENS, 6, DIM), P(None, "a"))

    def dense(q: Any, *kv: Any) -> Any:
        return fx.flash_attn_varlen_func(q, *kv, 6, STARTS, 6, STARTS)

    _, (message,) = warned(lambda: jax.jit(dense).lower(q, *three[1:]).compile())
    assert "flash_attn_varlen_func: q [6, 6, 16]" in message, message
    assert "3 KV heads do not divide into 2 equal parts" in message, message


def check_inside_shard_map_and_export() -> None:
    """A call inside jax.shard_map is nothing but itself; with explicit axes a program can be exported."""
    given = normal(TOKENS, HEADS, DIM), *(normal(PAGES, PAGE, KV_HEADS, DIM) for _ in "kv")
    specs = (P(None, "a"), P(None, None, "a"), P(None, None, "a"))

    def attend(q: Any, k: Any, v: Any) -> Any:
        return fx.paged_attention(q, (k, v), *INDEX, 0.2)

    arrays = [put(x, s) for x, s in zip(given, specs, strict=True)]
    mapped = jax.jit(jax.shard_map(attend, mesh=MESH, in_specs=specs, out_specs=specs[0]))
    lowered = mapped.lower(*arrays)
    assert "CustomSPMDPartitioning" not in lowered.as_text() and moves(lowered.compile()) == []
    close(mapped(*arrays), attend(*given))
    one = jax.jit(attend).lower(*given).as_text()
    assert "CustomSPMDPartitioning" not in one and "sdy" not in one
    if EXPLICIT:
        exported = jax.export.export(jax.jit(attend), disabled_checks=fx.export_checks())(*arrays)
        loaded = jax.jit(jax.export.deserialize(exported.serialize()).call)
        assert moves(loaded.lower(*arrays).compile()) == []
        close(loaded(*arrays), attend(*given))


def check_that_programs_tell_calls_apart() -> None:
    """The compilation cache on disk goes by a program's text, less the addresses in it."""
    given = (
        put(normal(TOKENS, HEADS, DIM), P(None, "a")),
        put(normal(PAGES, PAGE, KV_HEADS, DIM), P(None, None, "a")),
    )

    def text(scale: float, window: int | None = None) -> str:
        def attend(q: Any, k: Any) -> Any:
            return fx.paged_attention(q, (k, k), *INDEX, scale, window)

        return re.sub(r'backend_config = "\d+"', "", jax.jit(attend).lower(*given).as_text())

    assert text(0.1) == text(0.1)
    assert len({text(0.1), text(0.2), text(0.1, 3)}) == 3


PARTS = {
    "decoding": (check_decoding, check_scan, check_sharded_tokens, check_replicas),
    "gradients": (check_gradients, check_vmap),
    "random": (check_random,),
    "warnings": (
        check_warnings,
        check_inside_shard_map_and_export,
        check_that_programs_tell_calls_apart,
    ),
}

if __name__ == "__main__":
    assert jax.device_count() in (2, 4)
    for check in PARTS[sys.argv[1]]:
        check()
