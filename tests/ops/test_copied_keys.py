"""Few queries whose keys threads of `swap` copy: where TMA cannot load them, and where there is much to read.

On a CPU the same cases meet the kernels there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.batches import Case
from tests.frontends import Frontend
from tests.ops.engines import call_of, call_with_bound, check_twice, served_by, serves_few, with_room

pytestmark = pytest.mark.gpu_engine

DECODE = Case(
    ((1, 700), (1, 1), (1, 64), (1, 65), (1, 0), (1, 1900)), heads=(8, 2), dtype="bf16", dim=128, page=16
)
SPECULATION = dataclasses.replace(DECODE, lens=((4, 700), (3, 65), (2, 2), (0, 9), (1, 1100)))
# More rows than calls have that copy because there is much to read.
MORE = dataclasses.replace(DECODE, lens=((5, 700), (1, 65)))
MUCH = 2**18  # keys of all heads: 128 MB with their values, of 128 dims

SETTINGS: list[dict[str, Any]] = [
    {},
    {"dim": 256, "dtype": "f16", "heads": (4, 4)},
    {"dim": 200, "v_dim": 128, "softcap": 5.0},
    {"dim": 128, "v_dim": 192, "window": (90, 0), "layout": "HND"},
    {"page": 64, "leftpad": True, "sinks": "f32"},
    {"page": 8, "alibi": "SH", "lse": False},
    {"page": 128, "layout": "interleaved", "heads": (16, 1)},
    {"page": 24, "layout": "packed_HND", "pad_tokens": 3, "pad_seqs": 2, "heads": (6, 3)},
    {"page": None, "used": True, "dtype": "f16"},
    {"page": None, "leftpad": True, "heads": (28, 4)},
    {"cache": "e4m3", "dim": 256, "descale": "SH", "layout": "stacked"},
    {"cache": "e5m2", "dtype": "f16", "dim": 256, "page": 48, "scale": -0.1},
    {"cache": "e4m3", "dtype": "e4m3", "dim": 256, "causal": False},
]


@pytest.mark.frontends("torch", "jax_jit")
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("case", [DECODE, SPECULATION], ids=["decode", "speculation"])
def test_much_to_read(
    frontend: Frontend, rng: np.random.Generator, case: Case, setting: dict[str, Any]
) -> None:
    case = dataclasses.replace(case, **setting)
    if case.heads[0] // case.heads[1] > 4:
        case = dataclasses.replace(case, lens=DECODE.lens)
    function, arguments = call_with_bound(rng, case)
    arguments = with_room(arguments, case, MUCH)
    if frontend.name == "torch" and (served := serves_few(frontend, function, arguments)) is not None:
        assert served.startswith("swap") and "threads copy the keys" in served, served
    check_twice(frontend, function, arguments)


# Not with less to read, shorter rows, more rows of queries or another dtype.
USUAL: list[tuple[Case, int, str]] = [
    (DECODE, 2**17, "swap"),
    (dataclasses.replace(DECODE, dim=64), 2**19, "swap"),
    (dataclasses.replace(DECODE, cache="e4m3"), 2**19, "swap"),
    (MORE, MUCH, "swap"),
    (dataclasses.replace(DECODE, dtype="f32"), MUCH, "split32"),
    (dataclasses.replace(DECODE, dim=96), MUCH, "swap"),
]


@pytest.mark.frontends("torch")
@pytest.mark.parametrize(("case", "keys", "engine"), USUAL, ids=str)
def test_loaded_by_tma(
    frontend: Frontend, rng: np.random.Generator, case: Case, keys: int, engine: str
) -> None:
    function, arguments = call_with_bound(rng, case)
    served = serves_few(frontend, function, with_room(arguments, case, keys))
    assert served is None or (served.startswith(engine) and "copy" not in served), served


# Heads that do not all begin and end at multiples of 16 bytes, but at those of 8 or of 4.
ODD: list[dict[str, Any]] = [
    *({"dim": dim, "heads": (16, 8)} for dim in (2, 4, 10, 60, 62, 100, 102, 124, 126)),
    *({"dim": dim, "heads": (16, 8)} for dim in (130, 196, 198, 252, 254)),
    {"dim": 100, "heads": (9, 3)},
    {"dim": 100, "heads": (8, 8), "layout": "HND"},
    {"dim": 100, "v_dim": 44, "heads": (8, 4), "leftpad": True, "dtype": "f16"},
    {"dim": 112, "v_dim": 100, "heads": (8, 8), "sinks": "bf16", "softcap": 5.0},
    *(
        {"dim": dim, "heads": (8, 4), "cache": "e4m3"}
        for dim in (4, 12, 72, 88, 100, 120, 124, 136, 200, 244, 252)
    ),
    {"dim": 120, "heads": (8, 8), "cache": "e5m2", "dtype": "e4m3", "page": 1, "descale": "H"},
    {"dim": 72, "v_dim": 100, "heads": (16, 16), "cache": "e4m3", "dtype": "f16", "alibi": "H"},
    {"dim": 100, "heads": (8, 2), "cache": "e4m3", "layout": "interleaved"},
    {"dim": 104, "heads": (12, 3), "cache": "e4m3", "page": None, "dtype": "e5m2"},
]


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("setting", ODD, ids=str)
@pytest.mark.parametrize(
    "lens",
    [DECODE.lens, ((8, 700), (5, 65), (0, 9), (40, 1100)), ((1, 9000),)],
    ids=["decode", "more rows", "parts"],
)
def test_odd_heads(
    frontend: Frontend, rng: np.random.Generator, lens: tuple[tuple[int, int], ...], setting: dict[str, Any]
) -> None:
    function, arguments = call_of(rng, dataclasses.replace(DECODE, lens=lens, **setting))
    if (served := served_by(frontend, function, arguments)) is not None:
        assert served[0] == "swap"
        assert "threads copy the keys" in str(serves_few(frontend, function, arguments))
    check_twice(frontend, function, arguments)
