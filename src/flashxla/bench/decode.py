"""Decode: one new token of each sequence attends to all of its keys."""

from __future__ import annotations

from flashxla.bench import attention, cases, ceilings
from flashxla.bench.topic import Topic

TOPIC = Topic(
    name="decode",
    unit="GB/s",
    scale=1e9,
    cases=cases.DECODE,
    problem=attention.problem,
    work=cases.decode_work,
    ceiling=ceilings.copy,
    ours=attention.OURS,
    peers=(attention.SDPA, attention.SDPA_LOOP, attention.SDPA_GROUPED),
)
