"""Many sequences with fewer queries than a q tile has rows, or a few more: short prompts, and chunks of longer ones.

On Hopper `wide` gives a q tile all query heads of a KV head then, so that fewer rows stay unused. On a CPU the same
cases meet the kernels there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.batches import Case
from tests.frontends import Frontend
from tests.ops.engines import call_of, call_with_bound, check_twice, serves_many

pytestmark = pytest.mark.gpu_engine

# Query tokens and keys of each sequence; heads.
BATCHES = {
    "prompts shorter than a q tile": (tuple((n, n) for n in range(3, 63, 2)) * 2, (16, 4)),
    "prompts a bit longer than a q tile": (((130, 130),) * 16, (16, 4)),
    "chunks": (tuple((40, 40 + 50 * n) for n in range(20)), (32, 8)),
    "beside decode and a long prompt": (
        (*((1, 10 * n) for n in range(30)), (700, 700), (20, 60), (0, 5)),
        (32, 4),
    ),
    "groups of 7": (((17, 17), (19, 30), (90, 90), (3, 0)) * 6, (28, 4)),  # a q tile has 2 unused rows
    "a KV head of 32 heads": (((33, 35), (5, 700)) * 30, (32, 1)),
}
KINDS: list[dict[str, Any]] = [
    {},
    {"dtype": "f16", "dim": 64, "softcap": 5.0},
    {"dim": 96, "window": (30, 0)},
    {"dim": 192, "sinks": "f32"},
    {"dim": 192, "v_dim": 128},
    {"dtype": "f16", "dim": 256, "causal": False},
    {"dim": 64, "page": 64, "leftpad": True},
    {"dim": 64, "alibi": "SH"},  # a q tile has one slope
    {"cache": "e4m3", "descale": "SH"},
    {"dtype": "e5m2", "cache": "e4m3", "dim": 256},
    {"page": None, "scale": -0.1},
    {"page": 4},
]


def case_of(batch: str, kind: dict[str, Any]) -> Case:
    lens, heads = BATCHES[batch]
    return Case(lens, heads=heads, **({"dtype": "bf16", "dim": 128, "page": 16} | kind))


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("batch", BATCHES)
def test_short_sequences(
    frontend: Frontend, rng: np.random.Generator, batch: str, kind: dict[str, Any]
) -> None:
    case = case_of(batch, kind)
    function, arguments = call_of(rng, case)
    served = serves_many(frontend, function, arguments)
    if served is not None and "cache" not in kind and "dim" not in kind:
        assert served.startswith("wide:") and "all query heads of a KV head" in served
    check_twice(frontend, function, arguments)


@pytest.mark.frontends("torch", "jax_jit")
@pytest.mark.parametrize("batch", BATCHES)
def test_as_the_caller_promises(frontend: Frontend, rng: np.random.Generator, batch: str) -> None:
    """With the lengths' bound; with JAX a kernel makes the plan."""
    check_twice(frontend, *call_with_bound(rng, case_of(batch, {"dtype": "f16"})))


@pytest.mark.frontends("torch")
@pytest.mark.parametrize(
    ("len_q", "several"),
    [
        (16, False),
        (17, True),
        (64, True),
        (128, False),
        (130, True),
        (160, True),
        (256, False),
        (2000, False),
    ],
)
def test_which_lengths(frontend: Frontend, rng: np.random.Generator, len_q: int, several: bool) -> None:
    """A q tile has 128 rows, or 32 query tokens of 4 heads. Where that makes no difference it has one head."""
    case = Case(((len_q, len_q),) * 30, heads=(16, 4), dtype="bf16", dim=128, page=16)
    served = serves_many(frontend, *call_with_bound(rng, case))
    if served is not None:
        assert ("all query heads" in served) == several


@pytest.mark.frontends("torch", "jax_jit")
@pytest.mark.parametrize("cache", ["same", "e5m2"])
def test_many_keys(frontend: Frontend, rng: np.random.Generator, cache: str) -> None:
    """swap, which divides keys, serves those of up to 128 rows that see 4,096 keys or more."""
    lens = ((20, 5000), (33, 5000), (32, 4096), (47, 100), (60, 4100), (9, 4095), *((18, 20),) * 20)
    check_twice(
        frontend, *call_of(rng, Case(lens, heads=(32, 8), dtype="bf16", cache=cache, dim=64, page=16))
    )


@pytest.mark.frontends("torch", "jax_jit")
@pytest.mark.parametrize(
    ("index", "place"), [("block_table", (1, 2)), ("cu_seqlens_q", 2), ("seqused_k", 0)], ids=str
)
@pytest.mark.parametrize("sequences", [3, 20])
def test_unsound(
    frontend: Frontend, rng: np.random.Generator, sequences: int, index: str, place: int | tuple[int, int]
) -> None:
    """wide has a q tile at most for each thread block with 3 sequences, several with 20."""
    case = case_of("chunks", {"page": 8})
    function, arguments = call_of(rng, dataclasses.replace(case, lens=case.lens[:sequences]))
    arguments[index][place] = -1
    check_twice(frontend, function, arguments)


@pytest.mark.frontends("torch", "jax_jit")
@pytest.mark.parametrize(("sequences", "queries"), [(200, 30), (600, 1), (600, 30)])
def test_many_q_tiles(frontend: Frontend, rng: np.random.Generator, sequences: int, queries: int) -> None:
    """Up to 2,048 q tiles are sorted by their keys: by wide itself with 200 sequences, else by the plan."""
    lens = tuple((queries + n % 40, 40 + n % 300) for n in range(sequences))
    check_twice(frontend, *call_of(rng, Case(lens, heads=(4, 1), dtype="bf16", dim=128, page=16)))
