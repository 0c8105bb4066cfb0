"""Steps of a server at one padded shape: the buffers stay, what they hold changes from step to step."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from tests import reference
from tests.checks import TOLERANCE, assert_close, assert_same_bits

Array = np.ndarray

S, T, M, HEADS, KV_HEADS = 6, 320, 24, 8, 2
BLOCKS = S * M + 3
SCALE = 128**-0.5


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of step: the queries of a sequence, and the engine of its many queries on a Hopper GPU."""

    queries: tuple[tuple[int, int], ...]  # ranges, one of which each sequence draws from
    engine: str
    dtype: type = ml_dtypes.bfloat16
    page: int = 16
    dim: int = 128


KINDS = {
    "decode": Kind(((1, 1),), "wide"),  # of which there are none
    "speculation": Kind(((1, 10),), "wide"),
    "wide": Kind(((48, 150),), "wide"),
    "parts": Kind(((1, 1), (100, 150)), "wide", page=128),  # of few q tiles with many keys
    "odd heads": Kind(((1, 1), (1, 10), (17, 70)), "wide", page=4, dim=100),
    "tile": Kind(((17, 70),), "tile", page=4, dim=99),
    "mixed": Kind(((1, 1), (1, 10), (17, 47), (48, 120)), "wide"),
    "float32": Kind(((1, 1), (1, 60)), "tile32", np.float32),
}


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


def normal(rng: np.random.Generator, kind: str, *shape: int) -> Array:
    return rng.standard_normal(shape, np.float32).astype(KINDS[kind].dtype)


def empty_caches(rng: np.random.Generator, kind: str) -> tuple[Array, Array]:
    """Caches of random numbers."""
    key_cache, value_cache = (
        normal(rng, kind, BLOCKS, KINDS[kind].page, KV_HEADS, KINDS[kind].dim) for _ in "kv"
    )
    return key_cache, value_cache


def _queries(rng: np.random.Generator, kind: str) -> Array:
    """The queries of each sequence: as many sequences as fit, up to a random number."""
    ranges = KINDS[kind].queries
    queries: list[int] = []
    for _ in range(rng.integers(1, S, endpoint=True)):
        count = int(rng.integers(*ranges[rng.integers(len(ranges))], endpoint=True))
        if sum(queries) + count <= T:
            queries.append(count)
    return np.array(queries)


def step(rng: np.random.Generator, kind: str) -> Step:
    """Random lengths, pages and number of sequences."""
    queries, page = _queries(rng, kind), KINDS[kind].page
    count = len(queries)
    lengths = queries + rng.integers(0, M * page - queries.max(), count)
    table = rng.permutation(BLOCKS)[: S * M].reshape(S, M)
    slots = np.full(T, -1)
    starts = np.concatenate([[0], np.cumsum(queries), np.full(S - count, queries.sum())])
    for s in range(count):
        positions = np.arange(lengths[s] - queries[s], lengths[s])
        slots[starts[s] : starts[s + 1]] = table[s, positions // page] * page + positions % page
    return Step(
        query=normal(rng, kind, T, HEADS, KINDS[kind].dim),
        key=normal(rng, kind, T, KV_HEADS, KINDS[kind].dim),
        value=normal(rng, kind, T, KV_HEADS, KINDS[kind].dim),
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
    wanted, _ = reference.paged_attention(
        now.query, expected, now.lengths, now.table, now.starts, now.num_seqs, SCALE, layout="NHD"
    )
    assert_close(out, wanted, TOLERANCE["f32" if out.dtype == np.float32 else "bf16"])
