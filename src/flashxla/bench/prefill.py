"""Prefill: causal attention of prompts over their own keys."""

from __future__ import annotations

from flashxla.bench import attention, cases, ceilings
from flashxla.bench.topic import Topic

CASES = cases.PREFILL

TOPIC = Topic(
    name="prefill",
    unit="TFLOP/s",
    scale=1e12,
    cases=CASES,
    problem=attention.problem,
    work=cases.prefill_work,
    ceiling=ceilings.matmul,
    ours=attention.OURS,
    peers=(attention.SDPA, attention.SDPA_LOOP),
)
