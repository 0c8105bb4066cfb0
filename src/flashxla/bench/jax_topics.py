"""prefill, decode and kv_write in JAX: jitted programs, beside JAX's own attention and scatter."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import flashxla.jax as fx
from flashxla.bench import cases
from flashxla.bench.cases import AttentionCase, WriteCase
from flashxla.bench.frameworks import sample_loop
from flashxla.bench.topic import Ceiling, Options, Peer, Run, Topic


def _run(program: Callable[..., Any], *arrays: Any, results: Callable[[Any], Sequence[Any]]) -> Run:
    jitted = jax.jit(program)
    return Run(lambda: jax.block_until_ready(jitted(*arrays)), results)


# Attention


@dataclasses.dataclass(frozen=True)
class AttentionProblem:
    """q [T, Hq, D], k [Tk, Hk, D], v [Tk, Hk, Dv]: the sequences one after the other."""

    case: AttentionCase
    q: jax.Array
    k: jax.Array
    v: jax.Array


def _attention_problem(case: AttentionCase, dtype: Any, device: Any) -> AttentionProblem:
    random = np.random.default_rng(0)

    def array(*shape: int) -> jax.Array:
        return jax.device_put(random.standard_normal(shape).astype(dtype), device)

    queries, keys = (sum(lens) for lens in zip(*case.lens, strict=True))
    heads, kv_heads = case.heads
    k, v = (array(keys, kv_heads, dim) for dim in case.dims)
    return AttentionProblem(case, array(queries, heads, case.dim), k, v)


def _ours(problem: AttentionProblem) -> Run:
    case, device = problem.case, problem.q.device
    queries, keys = zip(*case.lens, strict=True)

    def integers(values: Any) -> jax.Array:
        return jax.device_put(np.asarray(values, np.int32), device)

    index = {"cu_seqlens_q": integers([0, *itertools.accumulate(queries)])}
    k, v = problem.k, problem.v
    if case.page is None:
        index["cu_seqlens_k"] = integers([0, *itertools.accumulate(keys)])
    else:
        (k, v), table = _paged(problem, case.page)
        index |= {"seqused_k": integers(keys), "block_table": integers(table)}

    def attend(q: Any, k: Any, v: Any, index: Any) -> Any:
        return fx.flash_attn_varlen_func(
            q,
            k,
            v,
            max_seqlen_q=max(queries),
            max_seqlen_k=max(keys),
            causal=True,
            batch_invariant=case.batch_invariant,
            **index,
        )

    return _run(attend, problem.q, k, v, index, results=lambda out: [out])


def _paged(problem: AttentionProblem, page: int) -> tuple[list[jax.Array], np.ndarray]:
    """K and V in pages [P, page, Hk, D] of shuffled order, and the block table."""
    lengths = [keys for _, keys in problem.case.lens]
    counts = [-(-n // page) for n in lengths]
    order = np.random.default_rng(1).permutation(sum(counts))
    table = np.zeros((len(counts), max(counts)), np.int32)
    slots, first = [], 0
    for row, count, length in zip(table, counts, lengths, strict=True):
        row[:count] = order[first : first + count]
        slots.append((row[:count, None] * page + np.arange(page)).reshape(-1)[:length])
        first += count
    where = np.concatenate(slots)
    caches = []
    for tokens in (problem.k, problem.v):
        cache = np.zeros((sum(counts) * page, *tokens.shape[1:]), tokens.dtype)
        cache[where] = tokens
        caches.append(jax.device_put(cache.reshape(-1, page, *tokens.shape[1:]), tokens.device))
    return caches, table


def _dot_product_attention(problem: AttentionProblem) -> Run:
    """JAX's own, on a padded batch."""
    case, device = problem.case, problem.q.device
    queries, keys = (np.array(lens, np.int32) for lens in zip(*case.lens, strict=True))

    def padded(tokens: jax.Array, lengths: np.ndarray) -> jax.Array:
        out = np.zeros((len(lengths), lengths.max(), *tokens.shape[1:]), tokens.dtype)
        out[np.arange(lengths.max()) < lengths[:, None]] = tokens
        return jax.device_put(out, device)

    q, k, v = padded(problem.q, queries), padded(problem.k, keys), padded(problem.v, keys)
    lengths: dict[str, Any] = {}
    if case.ragged:
        lengths = {"query_seq_lengths": jnp.asarray(queries), "key_value_seq_lengths": jnp.asarray(keys)}

    def attend(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=case.causal, **lengths)

    rows = np.arange(queries.max()) < queries[:, None]
    return _run(attend, q, k, v, results=lambda out: [np.asarray(out)[rows]])


# Cache writes


@dataclasses.dataclass(frozen=True)
class WriteProblem:
    """The new tokens [T, H, D], their slots [T], and caches [P, B, H, D] to copy for each contender."""

    tokens: tuple[jax.Array, jax.Array]
    slots: jax.Array
    caches: tuple[np.ndarray, np.ndarray]
    device: Any


def _write_problem(case: WriteCase, dtype: Any, device: Any) -> WriteProblem:
    random = np.random.default_rng(0)

    def array(*shape: int) -> np.ndarray:
        return random.standard_normal((*shape, case.heads, case.dim), np.float32).astype(dtype)

    key, value = (jax.device_put(array(case.tokens), device) for _ in "kv")
    slots = random.permutation(case.blocks * case.page)[: case.tokens].astype(np.int32)
    caches = array(case.blocks, case.page), array(case.blocks, case.page)
    return WriteProblem((key, value), jax.device_put(slots, device), caches, device)


def _donated(write: Callable[..., Any]) -> Callable[[WriteProblem], Run]:
    """write(key_cache, value_cache, key, value, slots): returns the new caches."""

    def build(p: WriteProblem) -> Run:
        program = jax.jit(write, donate_argnums=(0, 1))
        state = tuple(jax.device_put(cache.copy(), p.device) for cache in p.caches)

        def call() -> None:
            nonlocal state
            state = jax.block_until_ready(program(*state, *p.tokens, p.slots))

        return Run(call, lambda _: state)

    return build


def _cache_write(key_cache: Any, value_cache: Any, key: Any, value: Any, slots: Any) -> Any:
    return fx.reshape_and_cache_flash(key, value, key_cache, value_cache, slots)


def _scatter(key_cache: Any, value_cache: Any, key: Any, value: Any, slots: Any) -> Any:
    page = key_cache.shape[1]
    return tuple(
        cache.at[slots // page, slots % page].set(tokens)
        for cache, tokens in ((key_cache, key), (value_cache, value))
    )


# The machine's limits


def _matmul(dtype: Any, options: Options) -> Ceiling:
    """A matrix product in float32 or the case's dtype, the faster one; its work in floating point operations."""
    size = 256 if options.quick else (8192 if options.device == "cuda" else 1024)
    names = dict.fromkeys(("float32", np.dtype(dtype).name))
    ceilings = [_matmul_of(name, size, options.device) for name in names]
    return min(ceilings, key=lambda ceiling: sample_loop(ceiling.call, 1e-3))


@functools.cache
def _matmul_of(dtype: str, size: int, device: str) -> Ceiling:
    random = np.random.default_rng(0)
    a, b = (
        jax.device_put(random.standard_normal((size, size), np.float32), jax.devices(device)[0]).astype(dtype)
        for _ in range(2)
    )
    product = jax.jit(jnp.matmul)
    return Ceiling(f"matmul {size}^3 {dtype}", lambda: jax.block_until_ready(product(a, b)), 2.0 * size**3)


def _pass(dtype: Any, options: Options) -> Ceiling:
    """x + 1 in place, far beyond the processor's caches; its work in bytes read and written."""
    return _pass_of(2**20 if options.quick else 2**27, options.device)


@functools.cache
def _pass_of(num_bytes: int, device: str) -> Ceiling:
    state = jax.device_put(jnp.zeros(num_bytes // 4), jax.devices(device)[0])
    program = jax.jit(lambda x: x + 1, donate_argnums=0)

    def call() -> None:
        nonlocal state
        state = jax.block_until_ready(program(state))

    return Ceiling(f"x + 1 of {num_bytes // 2**20} MiB", call, 2.0 * num_bytes)


_ATTENTION = {
    "problem": _attention_problem,
    "ours": Peer("flashxla", _ours),
    "peers": (Peer("dot_product_attention", _dot_product_attention),),
}
TOPICS = {
    "prefill": Topic(
        name="prefill",
        unit="TFLOP/s",
        scale=1e12,
        cases=cases.PREFILL,
        work=cases.prefill_work,
        ceiling=_matmul,
        **_ATTENTION,  # type: ignore[arg-type]
    ),
    "decode": Topic(
        name="decode",
        unit="GB/s",
        scale=1e9,
        cases=cases.DECODE,
        work=cases.decode_work,
        ceiling=_pass,
        **_ATTENTION,  # type: ignore[arg-type]
    ),
    "kv_write": Topic(
        name="kv_write",
        unit="GB/s",
        scale=1e9,
        cases=cases.KV_WRITE,
        problem=_write_problem,
        work=cases.write_work,
        ceiling=_pass,
        ours=Peer("flashxla", _donated(_cache_write)),
        peers=(Peer("donated scatter", _donated(_scatter)),),
    ),
}
