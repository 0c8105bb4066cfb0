"""Prompts whose keys `wide` and `large` copy first, to aligned rows: see key_copies.h.

On a CPU the same cases meet the kernels there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.batches import Case, spoil, tokens_with_copies
from tests.frontends import Frontend
from tests.ops.engines import call_with_bound, check_twice, serves_many

pytestmark = pytest.mark.gpu_engine

COPIES = "on copies of keys and values"
USUAL = Case((), heads=(16, 2), dtype="bf16", dim=128, page=16)
# Queries and keys of each sequence, where a prompt of `n` tokens has enough products. Some sequences go to other
# engines, or have nothing to do.
BATCHES: dict[str, Callable[[int], tuple[tuple[int, int], ...]]] = {
    "a prompt": lambda n: ((n, n + 30),),
    "after other keys": lambda n: ((n, 3 * n),),
    "beside others": lambda n: ((n, n), (1, 90), (n + 100, n + 300), (0, 9), (n * 2 // 3, 90), (20, 50)),
    "four": lambda n: ((n, n), (n, n + 400), (n // 2, n // 2), (n // 2, n)),
}


def case_of(batch: str, **setting: Any) -> Case:
    case = dataclasses.replace(USUAL, **setting)
    return dataclasses.replace(case, lens=BATCHES[batch](tokens_with_copies(case.heads[0], case.dims)))


FP8: dict[str, Any] = {"cache": "e4m3"}
SETTINGS: list[dict[str, Any]] = [
    FP8,
    {"cache": "e5m2", "dtype": "f16", "layout": "HND", "descale": "SH"},
    {"cache": "u8:e4m3", "dim": 64, "page": 1, "window": (90, 0)},
    {"cache": "u8:e5m2", "dim": 256, "page": 4, "layout": "interleaved"},
    {"cache": "e4m3", "dim": 192, "v_dim": 128, "sinks": "f32", "leftpad": True},
    {"cache": "e4m3", "dtype": "f16", "dim": 256, "page": 128, "softcap": 5.0},
    {"cache": "e4m3", "page": None, "used": True, "alibi": "SH"},
    {"cache": "e5m2", "page": None, "dim": 120, "pad_tokens": 3},
    {"cache": "e4m3", "dim": 72, "alibi": "H", "scale": -0.1, "layout": "packed_NHD"},
    {"cache": "e4m3", "dim": 100, "descale": "H"},  # so are queries and outputs
    {"cache": "e4m3", "dim": 38, "v_dim": 98, "page": 24, "causal": False},  # keys one by one
    # 16-bit keys: small pages, odd heads
    {"page": 1},
    {"page": 20, "dim": 256, "dtype": "f16", "window": (300, 20), "causal": False},
    {"page": 3, "dim": 64, "layout": "stacked", "leftpad": True, "softcap": 5.0},
    {"dim": 100},
    {"dim": 98, "v_dim": 36, "dtype": "f16", "page": 1, "sinks": "f32"},
    {"page": None, "dim": 84, "softcap": 20.0, "lse": False},
    {**FP8, "dtype": "e4m3", "page": 1, "descale": "SH"},  # products of e4m3
    {**FP8, "dtype": "e4m3", "page": 6, "dim": 256, "window": (200, 0), "layout": "HND"},
    {"cache": "u8:e4m3", "dtype": "e4m3", "page": 4, "dim": 192, "v_dim": 128, "softcap": 5.0},
    {"dim": 250, "window": (130, 0), "leftpad": True},
    # heads above 256
    {"dim": 576, "v_dim": 512, "cache": "e4m3"},
    {"dim": 512, "page": 1, "dtype": "f16"},
    {"dim": 320, "cache": "e5m2", "page": 7, "alibi": "SH", "softcap": 5.0, "window": (90, 9), "causal": False},
    {"dim": 264, "v_dim": 40, "cache": "e4m3", "page": None, "sinks": "f32", "leftpad": True},
    {"dim": 16, "v_dim": 504, "cache": "u8:e4m3", "dtype": "f16", "descale": "SH", "layout": "HND"},
]  # fmt: skip


@pytest.mark.frontends("torch", "jax_jit")
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("batch", ["a prompt", "after other keys", "beside others"])
def test_copies(frontend: Frontend, rng: np.random.Generator, batch: str, setting: dict[str, Any]) -> None:
    function, arguments = call_with_bound(rng, case_of(batch, **setting))
    if frontend.name == "torch" and (served := serves_many(frontend, function, arguments)) is not None:
        assert served.endswith(COPIES), served
    check_twice(frontend, function, arguments)


LARGE: dict[str, Any] = {"dim": 512, "cache": "e4m3"}


# A sequence that sees a page that does not exist has another engine; one that does not see it has copies.
@pytest.mark.frontends("torch", "jax_jit")
@pytest.mark.parametrize(
    "setting",
    [FP8, {"page": 1}, {**FP8, "window": (70, 0)}, LARGE, {**LARGE, "page": 1, "window": (70, 0)}],
    ids=str,
)
def test_unsound_pages(frontend: Frontend, rng: np.random.Generator, setting: dict[str, Any]) -> None:
    case = case_of("four", **setting)
    function, arguments = call_with_bound(rng, case)
    table = arguments["block_table"]
    bad = np.zeros(table.shape, bool)
    bad[1, 0] = bad[1, 320 // (case.page or 1)] = bad[2, 3] = True
    bad[3, 0] = case.window[0] >= 0  # it does not see this one
    bad[3, -1] = True  # which has no key
    spoil(rng, table, bad, len(arguments["k"]))
    if frontend.name == "torch" and (served := serves_many(frontend, function, arguments)) is not None:
        assert served.endswith(COPIES), served
    check_twice(frontend, function, arguments)


# Copies take time and memory: not of keys that they would be like, nor where few rows see each key, nor for more keys
# than there may be queries, nor in small calls, nor with batch_invariant, where the engine would depend on the batch.
WITHOUT: list[tuple[Case, dict[str, Any]]] = [
    (case_of("a prompt"), {}),
    (case_of("a prompt", page=24), {}),
    (case_of("a prompt", page=None, dim=72), {}),
    (case_of("a prompt", **FP8, dtype="e4m3"), {}),
    (case_of("a prompt", cache="e4m3", dtype="e5m2", page=1), {}),
    (case_of("a prompt", **FP8, heads=(32, 32)), {}),
    (dataclasses.replace(USUAL, **FP8, lens=((1100, 18_000),)), {}),
    (dataclasses.replace(USUAL, **FP8, lens=((500, 1000),)), {}),
    (case_of("a prompt", **FP8), {"batch_invariant": True}),
]


@pytest.mark.frontends("torch")
@pytest.mark.parametrize(("case", "more"), WITHOUT, ids=str)
def test_without_copies(
    frontend: Frontend, rng: np.random.Generator, case: Case, more: dict[str, Any]
) -> None:
    function, arguments = call_with_bound(rng, case)
    served = serves_many(frontend, function, arguments | more)
    assert served is None or (served.startswith("wide") and COPIES not in served), served
