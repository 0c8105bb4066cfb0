"""New keys of decode and speculation: what the attention of the same call sees of them, wherever they go.

ragged_paged_attention writes all new keys before any sequence is read, also into pages that other sequences have in
their tables, as a prefix that two new prompts share. The slots of new keys are NaN in the cache before the call.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.batches import (
    Arguments,
    Case,
    caches_of,
    normal,
    positions,
    ragged_paged_attention_arguments,
    spoil,
    without_poison,
)
from tests.frontends import Frontend
from tests.ops.test_ragged_paged_attention import check, check_packed

DECODE = ((1, 700), (1, 1), (1, 64), (1, 65), (0, 9), (1, 0), (1, 3000))
SPECULATION = ((4, 700), (8, 8), (3, 130), (1, 64), (8, 65), (0, 9), (5, 3), (7, 1500))
pytestmark = pytest.mark.frontends("torch", "jax_jit")

BASE = Case(DECODE, (8, 2), 128, "bf16", page=16)


def of(**changes: Any) -> Case:
    return dataclasses.replace(BASE, **changes)


# case, slot_mapping (tests/batches.py)
CASES: list[tuple[Case, str | None]] = [
    (of(), None),
    (of(dtype="f16", pad_tokens=5, pad_seqs=2), "short"),
    (of(lens=SPECULATION, pad_tokens=3), "i64"),
    (of(lens=SPECULATION, heads=(8, 8), page=8), None),
    (of(lens=((1, 3),) * 520), None),
    (of(dim=80, heads=(3, 1), page=24), None),
    (of(dim=192, heads=(16, 1), layout="interleaved", page=128), "i32"),
    (of(dim=256, layout="packed_NHD", page=48), None),
    (of(heads=(32, 1), layout="stacked", page=40), None),
    (of(lens=SPECULATION, window=(40, 0), sinks="f32", softcap=5.0), None),
    (of(heads=(33, 1), cache="e4m3", descale="H"), "i32"),
]


def arguments_of(rng: np.random.Generator, case: Case, slots: str | None) -> Arguments:
    arguments = ragged_paged_attention_arguments(rng, case, "same", slots)
    return arguments | {"max_seqlen_q": max(len_q for len_q, _ in case.lens)}


@pytest.mark.parametrize(("case", "slots"), CASES, ids=str)
def test_case(frontend: Frontend, rng: np.random.Generator, case: Case, slots: str | None) -> None:
    check(frontend, arguments_of(rng, case, slots))


@pytest.mark.parametrize("slots", [None, "i32"])
def test_packed(frontend: Frontend, rng: np.random.Generator, slots: str | None) -> None:
    check_packed(frontend, arguments_of(rng, of(lens=SPECULATION, pad_tokens=2), slots))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("slots", [None, "i32"])
@pytest.mark.parametrize("page", [8, 16, 64])
def test_shared_pages(
    frontend: Frontend, rng: np.random.Generator, page: int, slots: str | None, seed: int
) -> None:
    """Sequences see pages in which this very call writes keys of others, wherever in their tables."""
    lens = tuple((int(rng.integers(1, 5)), int(rng.integers(1, 1200))) for _ in range(6))
    case = of(lens=lens, page=page, heads=(4, 2))
    arguments = without_poison(rng, arguments_of(rng, case, slots))
    table = arguments["block_tables"]
    written = [block for _, block, _ in positions(case, arguments)]
    shared = ~np.isin(table, written) & (rng.random(table.shape) < 0.5)
    table[shared] = rng.choice(written, shared.sum())
    check(frontend, arguments)


@pytest.mark.parametrize("seed", range(4))
def test_slots_elsewhere(frontend: Frontend, rng: np.random.Generator, seed: int) -> None:
    """slot_mapping alone says where tokens go, also those of no sequence."""
    case = of(lens=SPECULATION, pad_tokens=7, heads=(4, 2))
    arguments = without_poison(rng, arguments_of(rng, case, "i64" if seed % 2 else "i32"))
    num_slots = len(caches_of(arguments)[0]) * 16
    mapping = arguments["slot_mapping"]
    for name in ("key", "value"):
        arguments[name] = normal(rng, arguments[name].shape, arguments[name].dtype)
    mapping[:] = rng.permutation(num_slots)[: len(mapping)]
    hostile = rng.permutation(len(mapping))[:4]
    mapping[hostile] = [-1, num_slots, num_slots + 63, np.iinfo(mapping.dtype).max]
    check(frontend, arguments)


@pytest.mark.parametrize("seed", range(3))
def test_unsound_tables(frontend: Frontend, rng: np.random.Generator, seed: int) -> None:
    """A page that does not exist gets no key, and its keys are skipped."""
    case = of(lens=SPECULATION, heads=(4, 2))
    arguments = without_poison(rng, arguments_of(rng, case, None))
    table = arguments["block_tables"]
    spoil(rng, table, rng.random(table.shape) < 0.3, blocks=len(caches_of(arguments)[0]))
    check(frontend, arguments)
