"""Few queries after long contexts: too few q tiles for all multiprocessors, so that their keys are shared out.

On Hopper `wide` divides the q tiles of chunks into parts, which thread blocks compute and add up. How many there are
depends on heads, lengths and masks. Parts of few queries are added up at the end where `swap` does not serve them. On
a CPU the same cases meet the kernels there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.batches import Case
from tests.frontends import Frontend, TorchFrontend
from tests.ops.engines import call_of, call_with_bound, check_twice, served_by, serves_few

pytestmark = pytest.mark.gpu_engine

# Query tokens and keys of each sequence; heads.
BATCHES = {
    "one q tile": (((70, 9000),), (1, 1)),
    "two q tiles of 16 heads": (((200, 5000),), (16, 4)),
    "more q tiles than thread blocks": (((600, 2600),), (32, 8)),
    "long and short": (((128, 7000), (100, 100), (60, 1500), (49, 60)), (4, 2)),
    "beside decode": (((1, 900), (130, 6000), (1, 1), (40, 300)), (8, 1)),
    "a prompt": (((2300, 2300),), (2, 1)),
    # q tiles with all heads of a KV head. With groups of 7 they have unused rows, and groups of 71 leave too many.
    "a few queries of 7 heads": (((21, 6000), (9, 4000), (37, 40)), (14, 2)),
    "a token of many heads": (((9, 5000), (1, 3), (12, 2100)), (64, 1)),
    "many heads": (((60, 5000), (12, 2100)), (71, 1)),
}
KINDS: list[dict[str, Any]] = [
    {},
    {"dtype": "f16", "dim": 64, "softcap": 5.0},
    {"dim": 96, "window": (3000, 0)},
    {"dim": 192, "sinks": "f32"},
    {"dim": 192, "v_dim": 128, "softcap": 5.0},
    {"dim": 256, "causal": False},
    {"dim": 64, "alibi": "SH", "page": 64},
    {"cache": "e4m3", "descale": "SH"},
    {"cache": "e5m2", "dim": 256, "leftpad": True},
    {"dtype": "e4m3", "cache": "e4m3", "descale": "SH"},
    {"dtype": "e4m3", "cache": "e4m3", "dim": 192, "v_dim": 128},
    {"dtype": "e5m2", "cache": "e4m3", "dim": 192, "softcap": 30.0},
    {"page": None, "scale": -0.1},
    {"page": 4},
]


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("batch", BATCHES)
def test_parts(frontend: Frontend, rng: np.random.Generator, batch: str, kind: dict[str, Any]) -> None:
    lens, heads = BATCHES[batch]
    case = Case(lens, heads=heads, **({"dtype": "bf16", "dim": 128, "page": 16} | kind))
    function, arguments = call_of(rng, case)
    if (served := served_by(frontend, function, arguments)) is not None:
        packed = not case.alibi
        takes = packed or max(queries for queries, _ in lens) >= 48
        assert served == ("swap", "wide" if takes else "tile")
    check_twice(frontend, function, arguments)


@pytest.mark.frontends("jax_jit")
@pytest.mark.parametrize("cache", ["same", "e4m3"])
@pytest.mark.parametrize("batch", BATCHES)
def test_parts_of_a_plan(frontend: Frontend, rng: np.random.Generator, batch: str, cache: str) -> None:
    """In plain PyTorch engines make such plans themselves; here a kernel makes them."""
    lens, heads = BATCHES[batch]
    case = Case(lens, heads=heads, dtype="bf16", cache=cache, dim=128, page=16, softcap=4.0)
    check_twice(frontend, *call_of(rng, case))


@pytest.mark.frontends("torch", "jax_jit")
@pytest.mark.parametrize("page", [8, 64])
def test_unsound_pages(frontend: Frontend, rng: np.random.Generator, page: int) -> None:
    """Sequences with pages that do not exist get another engine, as without parts."""
    case = Case(((128, 7000), (100, 3000), (60, 1500)), heads=(4, 2), dtype="bf16", dim=64, page=page)
    function, arguments = call_of(rng, case)
    arguments["block_table"][1, 3] = -1
    check_twice(frontend, function, arguments)


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("number", range(12))
def test_random_chunks(frontend: Frontend, rng: np.random.Generator, number: int) -> None:
    sequences = int(rng.integers(1, 5))
    len_q = rng.integers(1, rng.choice([130, 400]), sequences, endpoint=True)
    len_k = len_q + rng.integers(0, rng.choice([1000, 12_000]), sequences)
    kv_heads = int(rng.integers(1, 5))
    case = Case(
        tuple(zip(len_q.tolist(), len_k.tolist(), strict=True)),
        heads=(kv_heads * int(rng.integers(1, 8)), kv_heads),
        dtype="bf16",
        dim=int(rng.choice([64, 128])),
        page=16,
    )
    case = dataclasses.replace(
        case, window=(int(rng.integers(100, 9000)), 0) if rng.random() < 0.3 else case.window
    )
    check_twice(frontend, *call_of(rng, case))


_MLA: dict[str, Any] = {"dim": 576, "v_dim": 512}
# Sequences of few queries that are in many parts each, and the engine that serves them on a Hopper GPU.
MANY_EACH: list[tuple[Case, str]] = [
    (Case(((1, 9000),), heads=(16, 1), **_MLA, dtype="bf16", page=16, sinks="f32"), "large_split"),
    (Case(((1, 5000), (1, 70), (1, 3), (1, 900)), heads=(100, 1), **_MLA, dtype="f16", page=8), "large_split"),
    (Case(((3, 8000),), heads=(32, 2), dim=512, dtype="bf16", cache="e4m3", page=64), "large_split"),
    (Case(((1, 7000), (1, 0)), heads=(17, 1), dim=264, dtype="bf16", window=(6000, 0), pad_tokens=3), "large_split"),
    (Case(((1, 20_000),), heads=(7, 1), dim=128, page=16, alibi="H"), "split32"),
    (Case(((2, 9000), (1, 4000)), heads=(8, 1), dim=64, page=64, softcap=5.0), "split32"),
    (Case(((1, 14_000),), heads=(16, 1), dim=256, page=16), "split32"),
    (Case(((1, 12_000),), heads=(24, 1), dim=99, dtype="bf16", page=16), "split"),
    (Case(((4, 20_000),), heads=(9, 1), dim=127, dtype="bf16", page=4, leftpad=True), "split"),
]  # fmt: skip


@pytest.mark.frontends("torch", "jax_jit")
@pytest.mark.parametrize(("case", "engine"), MANY_EACH, ids=str)
def test_many_parts_of_few_queries(
    frontend: Frontend, rng: np.random.Generator, case: Case, engine: str
) -> None:
    function, arguments = call_with_bound(rng, case)
    if isinstance(frontend, TorchFrontend) and (served := serves_few(frontend, function, arguments)):
        assert served.startswith(f"{engine}: ") and "several warps add up a row" in served, served
    check_twice(frontend, function, arguments)
