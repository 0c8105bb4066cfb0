"""Steps of a server at one padded shape: the buffers stay, what they hold changes from step to step."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from tests import reference
from tests.checks import TOLERANCE, assert_close, assert_same_bits

Array = np.ndarray

S, T, M, PAGE, HEADS, KV_HEADS, DIM = 6, 64, 16, 16, 8, 2, 128
BLOCKS = S * M + 3
SCALE = DIM**-0.5
KINDS = ("decode", "mixed")


@dataclasses.dataclass
class Step:
    """The inputs of one step: new tokens, and index tensors."""

    query: Array
    key: Array
    value: Array
    slots: Array
    starts: Array
    lengths: Array
    table: Array
    num_seqs: Array


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)


def empty_caches(rng: np.random.Generator) -> tuple[Array, Array]:
    """Caches of random numbers."""
    key_cache, value_cache = (normal(rng, BLOCKS, PAGE, KV_HEADS, DIM) for _ in "kv")
    return key_cache, value_cache


def step(rng: np.random.Generator, kind: str) -> Step:
    """Random lengths, pages and number of sequences; mixed: decoding and prefilling ones."""
    count = int(rng.integers(1, S + 1))
    queries = np.ones(count, int) if kind == "decode" else rng.integers(1, T // S + 1, count)
    lengths = queries + rng.integers(0, M * PAGE - T // S, count)
    table = rng.permutation(BLOCKS)[: S * M].reshape(S, M)
    slots = np.full(T, -1)
    starts = np.concatenate([[0], np.cumsum(queries), np.full(S - count, queries.sum())])
    for s in range(count):
        positions = np.arange(lengths[s] - queries[s], lengths[s])
        slots[starts[s] : starts[s + 1]] = table[s, positions // PAGE] * PAGE + positions % PAGE
    return Step(
        query=normal(rng, T, HEADS, DIM),
        key=normal(rng, T, KV_HEADS, DIM),
        value=normal(rng, T, KV_HEADS, DIM),
        slots=slots.astype(np.int32),
        starts=starts.astype(np.int32),
        lengths=np.pad(lengths, (0, S - count)).astype(np.int32),
        table=table.astype(np.int32),
        num_seqs=np.array([count], np.int32),
    )


def check(now: Step, old: tuple[Array, Array], new: tuple[Array, Array], out: Array) -> None:
    """Hold the caches after a step and its attention against the references."""
    expected = reference.reshape_and_cache_flash(now.key, now.value, *old, now.slots)
    for cache, wanted in zip(new, expected, strict=True):
        assert_same_bits(cache, wanted, "cache")
    wanted = reference.paged_attention(
        now.query, expected, now.lengths, now.table, now.starts, now.num_seqs, SCALE, layout="NHD"
    )
    assert_close(out, wanted, TOLERANCE["bf16"])
