"""Few queries with heads of 80 and 96, of which a thread block of `swap` has two neighbouring ones at a time.

Their keys lie side by side, and a thread block computes more with both than each head wants. On a CPU the same cases
meet the kernels there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.batches import Arguments, Case
from tests.frontends import Frontend
from tests.ops.engines import call_with_bound, check, check_twice, serves_few, with_room

pytestmark = pytest.mark.gpu_engine

DECODE = ((1, 700), (1, 1), (1, 64), (1, 65), (1, 0), (1, 1900))
LONG = ((1, 20_000), (1, 3))  # in more parts than a warp has lanes
SPECULATION = ((2, 700), (1, 65), (2, 2), (0, 9), (2, 1100))
PAIRS = Case(DECODE, heads=(8, 2), dim=96, dtype="bf16", page=16)

# What differs from PAIRS.
SETTINGS: list[dict[str, Any]] = [
    {},
    {"dtype": "f16"},
    {"page": None, "used": True},
    {"page": 8, "heads": (4, 4)},  # one row a head
    {"page": 64, "heads": (6, 2)},  # three: the second head's first row is in the middle of eight
    {"page": 256, "heads": (32, 4)},  # as many as there may be
    {"heads": (10, 10), "pad_tokens": 5, "pad_seqs": 2},
    {"heads": (2, 2), "lens": LONG},
    {"heads": (16, 2), "lens": LONG, "sinks": "f32"},
    {"lens": SPECULATION},
    {"lens": SPECULATION, "heads": (6, 2), "causal": False, "alibi": "SH"},
    {"lens": SPECULATION, "heads": (8, 2), "window": (70, 3), "causal": False, "leftpad": True},
    {"alibi": "H", "sinks": "bf16", "lse": False},
    {"softcap": 3.0, "scale": -0.2},
    {"softcap": 5.0, "alibi": "SH", "descale": "SH"},
    {"descale": "SH", "heads": (6, 2)},
    {"descale": "SH", "heads": (4, 2), "lens": LONG},  # parts are combined all at once
    {"descale": "SH", "heads": (16, 2), "lens": LONG},  # and of more than 8 rows
    {"descale": "H", "heads": (8, 8), "window": (100, -1)},
    {"scale": 0.0, "leftpad": True},
]
SETTINGS += [setting | {"dim": 80} for setting in SETTINGS]
# Whose heads are not taken two by two: their number is odd, they have too many rows, or they do not lie side by side.
ALONE: list[dict[str, Any]] = [
    {"heads": (9, 3)},
    {"heads": (18, 2)},
    {"heads": (12, 2), "lens": SPECULATION},
    {"layout": "HND"},
    {"layout": "interleaved"},
    {"cache": "e4m3"},
    {"dim": 88},
    {"v_dim": 80},
    {"v_dim": 128},
]


def assert_together(frontend: Frontend, function: str, arguments: Arguments, together: bool) -> None:
    if (served := serves_few(frontend, function, arguments)) is not None:
        assert served.startswith("swap") and ("two KV heads" in served) == together, served


@pytest.mark.frontends("torch")
@pytest.mark.parametrize(
    ("setting", "together"), [*((s, True) for s in SETTINGS), *((s, False) for s in ALONE)], ids=str
)
def test_call(frontend: Frontend, rng: np.random.Generator, setting: dict[str, Any], together: bool) -> None:
    case = dataclasses.replace(PAIRS, **setting)
    function, arguments = call_with_bound(rng, case)
    arguments = with_room(arguments, case)
    assert_together(frontend, function, arguments, together)
    check_twice(frontend, function, arguments)


@pytest.mark.frontends("torch")
def test_little_to_read(frontend: Frontend, rng: np.random.Generator) -> None:
    function, arguments = call_with_bound(rng, PAIRS)
    assert_together(frontend, function, arguments, False)
    check_twice(frontend, function, arguments)


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("size", [7, 255, 256, 257, 900])
def test_many_sequences(frontend: Frontend, rng: np.random.Generator, size: int) -> None:
    """With a plan of the engine's own, and with one made before it."""
    lens = tuple(
        (int(q), int(k)) for q, k in zip(rng.integers(0, 3, size), rng.integers(0, 150, size), strict=True)
    )
    case = dataclasses.replace(PAIRS, lens=lens, heads=(4, 2), dim=int(rng.choice([80, 96])))
    function, arguments = call_with_bound(rng, case)
    arguments = with_room(arguments | {"max_seqlen_q": 2}, case)
    assert_together(frontend, function, arguments, True)
    check_twice(frontend, function, arguments)


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("head", range(4))
@pytest.mark.parametrize("dim", [80, 96])
def test_what_a_neighbour_holds(
    frontend: Frontend, rng: np.random.Generator, name: str, head: int, dim: int
) -> None:
    """NaN and infinity in a head's keys or values change the results of no other head."""
    case = dataclasses.replace(PAIRS, heads=(8, 4), dim=dim, page=None)
    function, arguments = call_with_bound(rng, case)
    arguments = with_room(arguments, case)
    before, lse_before = check(frontend, function, arguments)
    spoiled = arguments[name].copy()
    spoiled[::3, head] = np.nan
    spoiled[1::3, head] = np.inf
    after, lse_after = getattr(frontend, function)(**{**arguments, name: spoiled})
    others = [h for h in range(8) if h // 2 != head]
    np.testing.assert_array_equal(np.asarray(after)[:, others], np.asarray(before)[:, others])
    np.testing.assert_array_equal(np.asarray(lse_after)[others], np.asarray(lse_before)[others])
    assert name == "v" or np.isnan(np.asarray(lse_after)[[2 * head, 2 * head + 1]]).any()
