"""Head sizes above 256. On Hopper `swap` serves up to 16 rows of a KV head, `large_split` and `large` more.

A row is a query token of a query head. On a CPU the same cases meet the kernels there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.batches import Case
from tests.frontends import Frontend
from tests.ops.engines import call_with_bound, check_twice, serves_few, serves_many

pytestmark = pytest.mark.gpu_engine

DECODE = Case(((1, 700), (1, 1), (1, 64), (1, 65), (1, 0), (1, 1900)), heads=(16, 1), dtype="bf16", page=16)
# By the most rows that a call promises.
ROWS = {
    "4": dataclasses.replace(DECODE, heads=(8, 2)),
    "16": DECODE,
    "15 of 3 queries": dataclasses.replace(
        DECODE, lens=((3, 700), (1, 65), (2, 2), (0, 9), (3, 1100)), heads=(5, 1)
    ),
    "17": dataclasses.replace(DECODE, heads=(17, 1)),
    "63 of 3 queries": dataclasses.replace(DECODE, lens=((3, 700), (1, 65), (2, 2), (0, 9)), heads=(21, 1)),
    "65": dataclasses.replace(DECODE, heads=(65, 1)),
    "128": dataclasses.replace(DECODE, heads=(128, 1)),
    "150": dataclasses.replace(DECODE, heads=(150, 1)),
}
MOST_OF_SWAP = 16
# Head sizes of keys and values.
SIZES = [(576, 512), (512, 512), (320, 320), (264, 64), (8, 504), (448, 384)]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"page": 1, "dtype": "f16"},
    {"page": None, "used": True, "leftpad": True},
    {"page": 7, "layout": "HND", "alibi": "SH"},
    {"page": 64, "layout": "HND", "softcap": 5.0, "sinks": "f32"},
    {"page": 24, "window": (90, 0), "pad_tokens": 3, "pad_seqs": 2, "lse": False},
    {"page": 128, "leftpad": True},
    {"page": 8, "dtype": "f16", "scale": -0.05, "descale": "SH"},
    {"cache": "e4m3"},
    {"cache": "e5m2", "dtype": "f16", "page": 48, "window": (300, 0), "descale": "SH"},
    {"cache": "e4m3", "dtype": "e4m3", "page": 3, "descale": "1", "scale": -0.05},
    {"cache": "e4m3", "alibi": "H", "leftpad": True},
]


def takes_vectors(case: Case) -> bool:
    """Whether heads begin and end at multiples of 16 bytes."""
    unit = 8 if case.cache == "same" else 16  # elements
    assert case.v_dim is not None
    return case.dim % unit == case.v_dim % unit == 0


def engine_of(case: Case) -> str:
    """What serves a case on Hopper."""
    rows = case.heads[0] // case.heads[1] * max(len_q for len_q, _ in case.lens)
    if rows <= MOST_OF_SWAP:
        return "swap"
    return "large_split" if takes_vectors(case) else "general"


def check_clusters(served: str, case: Case, rows: int, copies: bool = False) -> None:
    """On Hopper pairs of thread blocks serve more than 64 rows whose keys, or the copies of them, TMA can load."""
    loads = case.cache == "same" and (case.page is None or case.page % 8 == 0)
    assert ("two thread blocks" in served) == ((loads or copies) and rows > 64), served
    assert ("copies of keys" in served) == (copies and not loads), served


def has_copies(case: Case) -> bool:
    """Whether so many rows see each key that copies of the keys are made where TMA cannot load these."""
    rows = sum(len_q for len_q, _ in case.lens) + case.pad_tokens
    sequences = len(case.lens) + (case.pad_seqs or 0)
    return rows * case.heads[0] // case.heads[1] >= 1536 * sequences and case.dtype != "e4m3"


def check(frontend: Frontend, rng: np.random.Generator, case: Case) -> None:
    function, arguments = call_with_bound(rng, case)
    if frontend.name == "torch" and (served := serves_few(frontend, function, arguments)) is not None:
        engine = engine_of(case)
        assert served.startswith(engine + ":"), served
        assert ("threads copy the keys" in served) == (engine == "swap"), served
        if engine == "large_split":
            check_clusters(served, case, case.heads[0] // case.heads[1])
    check_twice(frontend, function, arguments)


@pytest.mark.frontends("torch", "jax_jit")
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_few_rows(
    frontend: Frontend, rng: np.random.Generator, sizes: tuple[int, int], rows: str, setting: dict[str, Any]
) -> None:
    check(frontend, rng, dataclasses.replace(ROWS[rows], dim=sizes[0], v_dim=sizes[1], **setting))


# Heads that do not begin and end at multiples of 16 bytes.
ODD: list[dict[str, Any]] = [
    {"dim": 300},
    {"dim": 290, "v_dim": 302, "page": 7},
    {"dim": 260, "v_dim": 510, "dtype": "f16", "page": None},
    {"dim": 300, "cache": "e4m3"},
    {"dim": 568, "v_dim": 500, "cache": "e5m2", "dtype": "e4m3", "page": 4, "descale": "H"},
]


@pytest.mark.frontends("torch", "jax_jit")
@pytest.mark.parametrize("setting", ODD, ids=str)
@pytest.mark.parametrize("rows", ["4", "16", "15 of 3 queries"])
def test_odd_heads(frontend: Frontend, rng: np.random.Generator, rows: str, setting: dict[str, Any]) -> None:
    check(frontend, rng, dataclasses.replace(ROWS[rows], **setting))


# Where a sequence may be in very many parts, large_split is faster.
PARTS: list[tuple[Case, str]] = [
    (dataclasses.replace(DECODE, lens=((1, 6100),)), "swap"),
    (dataclasses.replace(DECODE, lens=((1, 6300),)), "large_split"),
    (dataclasses.replace(DECODE, lens=((1, 5000), (1, 9000)), cache="e4m3"), "swap"),
    (dataclasses.replace(DECODE, lens=((1, 9000),), heads=(32, 2)), "swap"),
]


@pytest.mark.frontends("torch")
@pytest.mark.parametrize(("case", "engine"), PARTS, ids=str)
def test_many_parts(frontend: Frontend, rng: np.random.Generator, case: Case, engine: str) -> None:
    function, arguments = call_with_bound(rng, dataclasses.replace(case, dim=576, v_dim=512))
    if (served := serves_few(frontend, function, arguments)) is not None:
        assert served.startswith(engine + ":"), served
    check_twice(frontend, function, arguments)


MANY = Case(((130, 130), (70, 333), (300, 300), (9, 64), (65, 1200), (80, 0)), dtype="bf16", page=16)
# By the query heads of a KV head, so that q tiles end in the middle of a token, and of a pair's rows. Of 20 and of 130
# heads there are more q tiles than pairs of thread blocks.
GROUPS = {
    "2": dataclasses.replace(MANY, heads=(4, 2)),
    "3": dataclasses.replace(MANY, heads=(3, 1)),
    "20": dataclasses.replace(MANY, heads=(20, 1)),
    "130": dataclasses.replace(MANY, lens=((30, 64), (35, 333), (5, 5), (12, 200), (3, 0)), heads=(130, 1)),
}


@pytest.mark.frontends("torch", "jax_jit")
@pytest.mark.parametrize("setting", [*SETTINGS, {"causal": False, "page": 32, "window": (70, 40)}], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_many_rows(
    frontend: Frontend, rng: np.random.Generator, group: str, sizes: tuple[int, int], setting: dict[str, Any]
) -> None:
    case = dataclasses.replace(GROUPS[group], dim=sizes[0], v_dim=sizes[1], **setting)
    function, arguments = call_with_bound(rng, case)
    if frontend.name == "torch" and (served := serves_many(frontend, function, arguments)) is not None:
        copies = has_copies(case)
        engine = "large" if takes_vectors(case) or copies else "general"
        assert served.startswith(engine + ":"), served
        check_clusters(served, case, 128, copies)
    check_twice(frontend, function, arguments)
