"""Decode: one new token of each sequence attends to all of its keys."""

from __future__ import annotations

import torch

from flashxla.bench import attention, ceilings
from flashxla.bench.attention import AttentionCase
from flashxla.bench.topic import Topic


def _batch(*keys: int) -> tuple[tuple[int, int], ...]:
    return tuple((1, n) for n in keys)


_EVEN = _batch(*[4096] * 8)
_SKEWED = _batch(4096, 1500, 900, 512, 300, 200, 130, 64)

CASES = {
    "cpu": (
        AttentionCase("8 x 4096", _EVEN),
        AttentionCase("8 x 4096, pages of 16", _EVEN, page=16),
        AttentionCase("8 x 4096, 32 heads on 8", _EVEN, heads=(32, 8)),
        AttentionCase("8 x 4096, 32 heads on 8, pages of 16", _EVEN, heads=(32, 8), page=16),
        AttentionCase("ragged, 8 of 64 to 4096, pages of 16", _SKEWED, page=16),
    ),
    "cuda": (
        AttentionCase("8 x 16k, 32 heads on 8, pages of 16", _batch(*[16384] * 8), heads=(32, 8), page=16),
        AttentionCase("64 x 2k, 32 heads on 8, pages of 16", _batch(*[2048] * 64), heads=(32, 8), page=16),
        AttentionCase("ragged, 8 of 64 to 4096, pages of 16", _SKEWED, heads=(32, 8), page=16),
    ),
    "quick": (
        AttentionCase("2 x 48", _batch(48, 48), heads=(2, 2), dim=32),
        AttentionCase("ragged, pages of 16, 4 heads on 2", _batch(7, 64), heads=(4, 2), dim=32, page=16),
    ),
}


def _work(case: AttentionCase, dtype: torch.dtype) -> float:
    """Bytes of the keys and values, each read once."""
    return 2.0 * sum(keys for _, keys in case.lens) * case.heads[1] * case.dim * dtype.itemsize


TOPIC = Topic(
    name="decode",
    unit="GB/s",
    scale=1e9,
    cases=CASES,
    problem=attention.problem,
    work=_work,
    ceiling=ceilings.copy,
    ours=attention.OURS,
    peers=(attention.SDPA, attention.SDPA_LOOP, attention.SDPA_GROUPED),
)
