"""Heads that do not all begin and end at multiples of 16 bytes, as those of 100 dims do.

On Hopper TMA cannot load them, and threads of `swap` and `wide` copy them. On a CPU the same cases meet the kernels
there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.batches import Arguments, Case
from tests.checks import assert_same_bits
from tests.frontends import Frontend
from tests.ops.engines import call_of, call_with_bound, check_twice, served_by, serves_few, serves_many

pytestmark = pytest.mark.gpu_engine

# Query tokens and keys of each sequence.
BATCHES = {
    "decode": ((1, 700), (1, 1), (1, 64), (1, 65), (1, 0), (1, 1900)),
    "one long text": ((1, 9000),),
    "speculation": ((2, 700), (5, 65), (4, 4), (0, 9), (8, 1100)),
    "a chunk": ((40, 3000), (1, 20)),
    "a chunk in parts": ((100, 7000),),
    "prompts": ((130, 130), (64, 64), (1, 90), (257, 300), (0, 3), (500, 500)),
    "short prompts": tuple((n, n) for n in range(20, 70, 3)),
}
KINDS: list[dict[str, Any]] = [
    {},
    {"dtype": "f16", "dim": 60, "softcap": 5.0},
    {"dim": 36, "v_dim": 100, "window": (30, 0)},
    {"dim": 100, "v_dim": 36, "sinks": "f32", "lse": False},
    {"dim": 250, "heads": (8, 4), "causal": False},
    {"dtype": "f16", "dim": 132, "page": 64, "leftpad": True, "heads": (4, 2)},
    {"dim": 2, "heads": (8, 8), "dtype": "f16"},
    {"dim": 98, "heads": (4, 1), "page": 1},
    {"dim": 196, "v_dim": 124, "scale": -0.1},
    {"page": None, "dim": 84, "pad_tokens": 3},
    {"page": None, "dim": 84, "used": True, "softcap": 20.0},
    {"page": 8, "dim": 20},
    {"dim": 64, "v_dim": 60},
    {"page": 4},
    {"page": 17, "layout": "HND"},
    {"layout": "interleaved"},
]
# fp8 keys, in units of 8 and of 4 bytes, with queries of every dtype.
FP8: list[dict[str, Any]] = [
    {"cache": "e4m3", "dim": 72, "heads": (8, 4), "descale": "SH"},
    {"cache": "e5m2", "dim": 100, "heads": (8, 4)},
    {"cache": "e4m3", "dim": 24, "dtype": "f16", "window": (90, 0), "layout": "HND"},
    {"cache": "e4m3", "dim": 120, "v_dim": 44, "alibi": "SH", "page": 3},
    {"cache": "e5m2", "dim": 152, "dtype": "f16", "softcap": 10.0, "sinks": "f32", "leftpad": True},
    {"cache": "e4m3", "dim": 196, "page": 64, "scale": -0.1},
    {"cache": "e4m3", "dim": 252, "heads": (4, 2), "causal": False},
    {"cache": "e4m3", "dim": 112, "v_dim": 108},  # keys of whole vectors
    {"cache": "e5m2", "page": None, "dim": 88, "used": True},
    {"dtype": "e4m3", "cache": "e4m3", "dim": 104, "heads": (6, 2)},
    {"dtype": "e5m2", "cache": "e4m3", "dim": 60, "descale": "H", "pad_tokens": 3},
    {"dtype": "e4m3", "cache": "e5m2", "dim": 180, "page": 1},
    {"dtype": "e4m3", "cache": "e4m3", "dim": 232, "layout": "interleaved"},
]
# Of these another engine serves many queries: of numbers that lie at odd places, and ALiBi.
OTHERS: list[dict[str, Any]] = [
    {"dim": 99, "heads": (8, 8)},
    {"dim": 100, "v_dim": 1},
    {"cache": "e4m3", "dim": 74},
    {"alibi": "SH"},
]


def case_of(batch: str, kind: dict[str, Any]) -> Case:
    return Case(BATCHES[batch], **({"dtype": "bf16", "dim": 100, "page": 16, "heads": (8, 2)} | kind))


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("kind", [*KINDS, *FP8, *OTHERS], ids=str)
@pytest.mark.parametrize("batch", BATCHES)
def test_odd_heads(frontend: Frontend, rng: np.random.Generator, batch: str, kind: dict[str, Any]) -> None:
    check_twice(frontend, *call_of(rng, case_of(batch, kind)))


@pytest.mark.frontends("torch", "jax_jit")
@pytest.mark.parametrize("batch", BATCHES)
def test_as_the_caller_promises(frontend: Frontend, rng: np.random.Generator, batch: str) -> None:
    """With the lengths' bound; with JAX a kernel makes the plan."""
    check_twice(frontend, *call_with_bound(rng, case_of(batch, {"dtype": "f16"})))


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("kind", [*KINDS, *FP8, *OTHERS], ids=str)
def test_which_engine(frontend: Frontend, rng: np.random.Generator, kind: dict[str, Any]) -> None:
    function, arguments = call_of(rng, case_of("prompts", kind))
    served = served_by(frontend, function, arguments)
    if served is None:
        return
    by_wide, copied = kind not in OTHERS, kind not in OTHERS or "alibi" in kind
    assert served == ("swap" if copied else "split", "wide" if by_wide else "tile")
    assert ("threads copy the keys" in str(serves_few(frontend, function, arguments))) == copied
    assert ("not of whole 16 bytes" in str(serves_many(frontend, function, arguments))) == by_wide


def with_nan(arguments: Arguments, head: int) -> Arguments:
    """The call with NaN in all keys and values of a KV head."""
    changed = {name: arguments[name].copy() for name in ("k", "v")}
    for cache in changed.values():
        cache[..., head, :] = np.nan
    return arguments | changed


@pytest.mark.frontends("torch", "jax_jit")
@pytest.mark.parametrize("kind", [{}, {"cache": "e5m2"}, {"dim": 250}, {"page": None}], ids=str)
@pytest.mark.parametrize("batch", ["decode", "a chunk", "prompts"])
def test_heads_are_apart(
    frontend: Frontend, rng: np.random.Generator, batch: str, kind: dict[str, Any]
) -> None:
    """NaN in a head is in no result of another one."""
    function, arguments = call_of(rng, case_of(batch, kind | {"heads": (8, 4)}))
    out, _ = getattr(frontend, function)(**arguments)
    q = arguments["q"].copy()
    q[:, 2:4] = np.nan
    got, _ = getattr(frontend, function)(**(with_nan(arguments, 1) | {"q": q}))
    others = [0, 1, 4, 5, 6, 7]
    assert_same_bits(got[:, others], out[:, others], "out of the other heads")
