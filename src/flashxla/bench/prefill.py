"""Prefill: causal attention of prompts over their own keys."""

from __future__ import annotations

import torch

from flashxla.bench import attention, ceilings
from flashxla.bench.attention import AttentionCase
from flashxla.bench.topic import Topic, log_uniform


def prompts(*lens: int) -> tuple[tuple[int, int], ...]:
    """As many keys as queries."""
    return tuple((n, n) for n in lens)


RAGGED = prompts(*log_uniform(64, 2048, 8, seed=1))

CASES = {
    "cpu": (
        AttentionCase("1 x 2048", prompts(2048)),
        AttentionCase("4 x 512", prompts(*[512] * 4)),
        AttentionCase("1 x 2048, pages of 16", prompts(2048), page=16),
        AttentionCase("1 x 2048, 32 heads on 8", prompts(2048), heads=(32, 8)),
        AttentionCase("ragged, 8 of 64 to 2048", RAGGED),
    ),
    "cuda": (
        AttentionCase("1 x 8192, 32 heads on 8", prompts(8192), heads=(32, 8)),
        AttentionCase("1 x 8192, 32 heads on 8, pages of 16", prompts(8192), heads=(32, 8), page=16),
        AttentionCase("4 x 2048, 32 heads on 8, pages of 16", prompts(*[2048] * 4), heads=(32, 8), page=16),
        AttentionCase("ragged, 8 of 64 to 2048, pages of 16", RAGGED, heads=(32, 8), page=16),
    ),
    "quick": (
        AttentionCase("2 x 32", prompts(32, 32), heads=(2, 2), dim=32),
        AttentionCase("ragged, pages of 16, 4 heads on 2", prompts(7, 33), heads=(4, 2), dim=32, page=16),
    ),
}


def work(case: AttentionCase, dtype: torch.dtype) -> float:
    """Floating point operations: two products, over the keys that causality and a window leave."""
    pairs = 0
    for n, _ in case.lens:
        window = n if case.window is None else min(case.window, n)
        pairs += window * (window + 1) // 2 + (n - window) * window
    return 4.0 * case.heads[0] * case.dim * pairs


TOPIC = Topic(
    name="prefill",
    unit="TFLOP/s",
    scale=1e12,
    cases=CASES,
    problem=attention.problem,
    work=work,
    ceiling=ceilings.matmul,
    ours=attention.OURS,
    peers=(attention.SDPA, attention.SDPA_LOOP),
)
