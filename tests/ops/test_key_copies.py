"""Prompts whose keys `wide` and `large` copy first, as aligned rows of 16-bit numbers: see key_copies.h.

On a CPU the same cases meet the kernels there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.batches import Case, spoil
from tests.frontends import Frontend
from tests.ops.engines import call_with_bound, check_twice, serves_many

pytestmark = pytest.mark.gpu_engine

COPIES = "on aligned 16-bit copies of keys and values"
PROMPT = Case(((400, 430),), heads=(8, 2), dtype="bf16", dim=128, page=16)
BATCHES = {
    "a prompt": PROMPT,
    "after other keys": dataclasses.replace(PROMPT, lens=((300, 1100),), heads=(8, 1)),
    # Some sequences go to other engines, or have nothing to do.
    "beside others": dataclasses.replace(
        PROMPT, lens=((600, 600), (0, 9), (1, 90), (500, 700), (20, 50), (900, 901), (70, 0)), heads=(8, 1)
    ),
}
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
    {"cache": "e4m3", "dim": 100, "descale": "H", "pad_seqs": 2},  # so are queries and outputs
    {"cache": "e4m3", "dim": 38, "v_dim": 98, "page": 24, "causal": False},  # keys one by one
    # 16-bit keys: small pages, odd heads
    {"page": 1},
    {"page": 20, "dim": 256, "dtype": "f16", "window": (300, 20), "causal": False},
    {"page": 3, "dim": 64, "layout": "stacked", "leftpad": True, "softcap": 5.0},
    {"dim": 100},
    {"dim": 98, "v_dim": 36, "dtype": "f16", "page": 1, "sinks": "f32"},
    {"page": None, "dim": 84, "softcap": 20.0, "lse": False},
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
@pytest.mark.parametrize("batch", BATCHES)
def test_copies(frontend: Frontend, rng: np.random.Generator, batch: str, setting: dict[str, Any]) -> None:
    function, arguments = call_with_bound(rng, dataclasses.replace(BATCHES[batch], **setting))
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
    lens = ((500, 500), (300, 900), (400, 400), (200, 700))
    case = dataclasses.replace(PROMPT, lens=lens, heads=(8, 1), **setting)
    function, arguments = call_with_bound(rng, case)
    table = arguments["block_table"]
    bad = np.zeros(table.shape, bool)
    bad[1, 0] = bad[1, 320 // (case.page or 1)] = bad[2, 3] = True  # of the last sequence none
    bad[3, -1] = True  # which has no key
    spoil(rng, table, bad, len(arguments["k"]))
    check_twice(frontend, function, arguments)


# Copies take time and memory: not of keys that they would be like, nor where few rows see each key, nor for more keys
# than there may be queries, nor with batch_invariant, where the engine would depend on the batch.
USUAL: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"page": 24}, {}),
    ({"page": None, "dim": 72}, {}),
    ({**FP8, "dtype": "e4m3"}, {}),
    ({**FP8, "lens": ((300, 500),)}, {}),
    ({**FP8, "lens": ((400, 3300),)}, {}),
    (FP8, {"batch_invariant": True}),
]


@pytest.mark.frontends("torch")
@pytest.mark.parametrize(("setting", "more"), USUAL, ids=str)
def test_without_copies(
    frontend: Frontend, rng: np.random.Generator, setting: dict[str, Any], more: dict[str, Any]
) -> None:
    function, arguments = call_with_bound(rng, dataclasses.replace(PROMPT, **setting))
    served = serves_many(frontend, function, arguments | more)
    assert served is None or (served.startswith("wide") and COPIES not in served), served
