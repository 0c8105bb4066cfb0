"""Few queries: decode, speculation, and chunks of few queries that see many keys. On Hopper `swap` serves them.

It has code of its own for calls that promise at most 16 rows (a row is a query token of a query head) of a KV head,
where thread blocks combine their partial results themselves, and for all others; for three head sizes, and for fp8
keys; and for sequences of up to 8, 16, 32, 64 and 128 rows. On a CPU the same cases meet the kernels there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import reference
from tests.batches import Arguments, Case, spoil
from tests.checks import assert_attention
from tests.frontends import Frontend, TorchFrontend, map_arrays
from tests.ops.engines import ONE_TENSOR, call_of, call_with_bound, check_twice, served_by
from tests.ops.test_index_tensors import assert_paged, corruptions, inside, paged_arguments, seeds

pytestmark = pytest.mark.gpu_engine

# By the most rows that a call promises.
ROWS = {
    "16 rows": Case(((1, 700), (8, 70), (9, 129), (0, 9), (16, 1100), (3, 0), (5, 3)), heads=(2, 2)),
    "16 rows of a group": Case(((1, 900), (1, 1), (1, 64), (1, 65), (1, 0)), heads=(16, 1)),
    "32 rows": Case(((1, 700), (16, 1100), (8, 70), (12, 333), (0, 9), (15, 14), (3, 0)), heads=(4, 2)),
    "32 rows of a group": Case(((1, 5000), (1, 1), (1, 130), (1, 0)), heads=(32, 1)),
    "64 rows": Case(
        ((1, 700), (8, 70), (16, 200), (17, 300), (32, 90), (33, 400), (64, 600), (64, 30)), heads=(2, 2)
    ),
    "100 rows": Case(((1, 700), (1, 70), (1, 0), (1, 1)), heads=(100, 1)),
    "200 rows": Case(((1, 700), (1, 65)), heads=(400, 2)),
    "chunks": Case(((64, 5000), (1, 300), (20, 900), (128, 4100), (300, 310), (47, 512)), heads=(4, 1)),
    # Few by their keys; with one query or key less or more they are not.
    "bounds": Case(
        ((47, 255), (47, 256), (47, 511), (47, 512), (48, 512), (48, 4096), (128, 4096), (129, 4096)),
        heads=(4, 2),
    ),
}
FP8_CACHES = [("bf16", "e4m3"), ("bf16", "u8:e5m2"), ("f16", "e5m2"), ("e4m3", "e4m3"), ("e5m2", "u8:e4m3")]
KINDS = [
    *(("bf16", "same", dim) for dim in (8, 64, 80, 96, 128, 192, 256)),
    *(("f16", "same", dim) for dim in (64, 128, 256)),
    *((*dtypes, dim) for dtypes in FP8_CACHES for dim in (64, 128, 256)),
    *(("bf16", "e4m3", dim) for dim in (16, 80, 192)),
]
SETTINGS: list[dict[str, Any]] = [
    {"page": None},
    {"page": None, "used": True, "leftpad": True},
    {"page": 8, "layout": "packed_HND"},
    {"page": 24, "layout": "HND", "leftpad": True},
    {"page": 64, "layout": "stacked", "alibi": "SH"},
    {"page": 128, "layout": "interleaved", "softcap": 3.0},
    {"page": 8, "alibi": "H", "sinks": "f32"},
    {"page": 32, "softcap": 5.0, "alibi": "SH", "causal": False},
    {"page": 40, "window": (70, -1), "sinks": "bf16"},
    {"page": 48, "window": (200, 3), "causal": False, "leftpad": True},
    {"page": 16, "window": (0, 0), "causal": False},
    {"page": 16, "causal": False, "scale": -0.2, "lse": False},
    {"page": 16, "scale": 0.0, "pad_tokens": 5, "pad_seqs": 2},
]


def many_engine(case: Case) -> str:
    """What serves the sequences of many queries, where swap serves those of few."""
    if case.heads[0] // case.heads[1] * max(len_q for len_q, _ in case.lens) <= 64 or case.heads[0] >= 100:
        return "swap"  # there are none
    return "wide"


def check_served(frontend: Frontend, function: str, arguments: Arguments, case: Case) -> None:
    if (served := served_by(frontend, function, arguments)) is not None:
        assert served == ("swap", many_engine(case))
    check_twice(frontend, function, arguments)


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind)))
@pytest.mark.parametrize("rows", ["16 rows", "32 rows", "64 rows", "100 rows", "chunks"])
def test_dtypes_and_head_sizes(
    frontend: Frontend, rng: np.random.Generator, rows: str, kind: tuple[str, str, int]
) -> None:
    dtype, cache, dim = kind
    descale = None if cache == "same" else "SH"
    case = dataclasses.replace(ROWS[rows], dtype=dtype, cache=cache, dim=dim, page=16, descale=descale)
    if rows == "chunks" and dim > 128:
        case = dataclasses.replace(case, lens=case.lens[1:])
    check_served(frontend, *call_with_bound(rng, case), case)


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("cache", ["same", "e4m3"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_pages_and_masks(
    frontend: Frontend, rng: np.random.Generator, rows: str, setting: dict[str, Any], cache: str
) -> None:
    case = dataclasses.replace(ROWS[rows], dtype="bf16", cache=cache, dim=64, **setting)
    if case.layout not in ONE_TENSOR and rows == "16 rows":
        case = dataclasses.replace(case, dim=128)
    check_served(frontend, *call_with_bound(rng, case), case)


# Sequences, heads, the most keys: how the steps are shared out among thread blocks.
SHARES = [
    (1, (1, 1), 20_000),  # one sequence in all blocks, in more parts than a warp has lanes
    (2, (16, 1), 9000),
    (2, (32, 1), 20_000),  # fewer parts, since a block combines many rows
    (150, (2, 1), 400),  # blocks end in the middle of sequences
    (700, (1, 1), 150),  # and have several
    (40, (32, 8), 900),
    (1, (32, 8), 6000),  # each multiprocessor has one block, with several steps of a sequence
    (3, (28, 4), 5000),
    (3, (280, 140), 300),  # a block for each KV head
    (2, (600, 600), 200),  # more KV heads than blocks
]


@pytest.mark.frontends("torch")
@pytest.mark.parametrize(("sequences", "heads", "most"), SHARES)
@pytest.mark.parametrize("cache", ["same", "e4m3"])
@pytest.mark.parametrize("queries", [1, 20])
def test_shares(
    frontend: Frontend,
    rng: np.random.Generator,
    sequences: int,
    heads: tuple[int, int],
    most: int,
    cache: str,
    queries: int,
) -> None:
    """The last sequences may be short, so that one block has them all, and some have no keys."""
    len_k = rng.integers(most // 2 if sequences < 9 else 0, most, sequences)
    len_k[sequences // 2 :] //= int(rng.choice([1, 40]))
    len_q = rng.integers(1, queries, sequences, endpoint=True)
    len_q[0] = queries
    lens = tuple(zip(len_q.tolist(), len_k.tolist(), strict=True))
    if queries > 1:
        heads = (heads[1], heads[1])
        lens = lens[:40]
    case = Case(lens, heads=heads, dim=64, dtype="bf16", cache=cache, page=16)
    check_served(frontend, *call_with_bound(rng, case), case)


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("cache", ["same", "e4m3"])
def test_longer_than_promised(frontend: Frontend, rng: np.random.Generator, cache: str) -> None:
    """Sequences of more rows than the call promised: several q tiles, each of which blocks combine."""
    lens = ((1, 700), (70, 900), (33, 3000), (1, 1), (17, 17))
    case = Case(lens, heads=(4, 2), dim=128, dtype="bf16", cache=cache, page=16)
    function, arguments = call_of(rng, case)
    check_twice(frontend, function, arguments | {"max_seqlen_q": 1})


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("cache", ["same", "e4m3"])
@pytest.mark.parametrize("rows", ["16 rows", "32 rows", "64 rows"])
def test_queries_of_any_strides(
    frontend: TorchFrontend, rng: np.random.Generator, rows: str, cache: str
) -> None:
    """Queries and results whose vectors of 16 bytes do not lie together."""
    case = dataclasses.replace(ROWS[rows], dtype="bf16", cache=cache, dim=96, page=16)
    function, arguments = call_of(rng, case)
    tensors = {k: map_arrays(frontend.tensor, v) for k, v in arguments.items()}
    q = tensors["q"]
    apart = frontend.torch.full((*q.shape[:2], 2 * q.shape[2] + 1), float("nan"), dtype=q.dtype).to(q.device)
    tensors["q"] = apart[..., 1::2].copy_(q)
    out, lse = getattr(frontend.fx, function)(**tensors)
    expected = reference.flash_attn_varlen_func(**arguments)
    assert_attention(frontend.array(out), frontend.array(lse), expected, arguments["q"].dtype)


HOSTILE_PAGES = [(8, "NHD"), (16, "HND"), (24, "packed_NHD"), (64, "stacked"), (128, "NHD")]


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("cache", ["same", "e4m3"])
@pytest.mark.parametrize(("page", "layout"), HOSTILE_PAGES)
@pytest.mark.parametrize("rows", ["16 rows", "32 rows", "64 rows", "chunks"])
def test_unsound_pages(
    frontend: Frontend, rng: np.random.Generator, rows: str, page: int, layout: str, cache: str
) -> None:
    """The keys of pages that do not exist are skipped, and no others. All else in memory is NaN."""
    case = dataclasses.replace(
        ROWS[rows], dtype="bf16", cache=cache, dim=64, page=page, layout=layout, sinks="f32"
    )
    function, arguments = call_with_bound(rng, case)
    table = arguments["block_tables" if function == "paged_attention" else "block_table"]
    # A call has three pages more than its sequences use.
    blocks = sum(-(-len_k // page) for _, len_k in case.lens) + 3
    bad = rng.random(table.shape) < 0.3
    bad[1] = True  # a sequence without any page
    spoil(rng, table, bad, blocks)
    check_served(frontend, function, arguments, case)


HOSTILE_BATCH = ((1, 17), (5, 9), (8, 8), (3, 200))
HOSTILE = [
    Case(HOSTILE_BATCH, dtype="bf16", page=8, pad_tokens=3, pad_seqs=1),
    Case(HOSTILE_BATCH, dtype="bf16", page=16, layout="interleaved", cache="e4m3", descale="SH", pad_seqs=1),
    Case(HOSTILE_BATCH, heads=(2, 2), dtype="f16", page=64, layout="packed_HND", window=(40, 0), pad_seqs=2),
]


@pytest.mark.frontends("torch")
@settings(max_examples=150)
@given(case=st.sampled_from(HOSTILE), most=st.sampled_from([1, 8, None]), seed=seeds, changes=corruptions())
def test_any_index_tensors(
    frontend: TorchFrontend, case: Case, most: int | None, seed: int, changes: list[tuple[int, int, int]]
) -> None:
    """As tests/ops/test_index_tensors.py, for 16 bits."""
    arguments = paged_arguments(case, seed, changes)
    served = served_by(frontend, "paged_attention", arguments | {"max_seqlen_q": most})
    assert served is None or served[0] == "swap"
    tensors = {k: map_arrays(lambda array: inside(frontend, array, np.nan), v) for k, v in arguments.items()}
    out, lse = map(frontend.array, frontend.fx.paged_attention(**tensors, max_seqlen_q=most))
    assert_paged(out, lse, arguments, case)
