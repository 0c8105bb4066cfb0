"""What the GPU itself can do, measured in the same run: the best copy and the best matrix product."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from flashxla.bench.gpu import compare, timers
from flashxla.bench.gpu.settings import Settings

COPY, MATMUL = "copy", "matmul"


def measure(settings: Settings) -> dict[str, dict[str, Any]]:
    """Both ceilings, in TB/s (read + written) and TFLOP/s."""
    found = {COPY: _copy(settings), MATMUL: _matmul(settings)}
    compare.free_memory(settings)
    return found


def _copy(settings: Settings) -> dict[str, Any]:
    num_bytes = 2**20 if settings.quick else 4 * 2**30
    source = torch.ones(num_bytes // 4, device=settings.device)
    target = torch.zeros_like(source)
    rate, method = _rate([lambda: target.copy_(source)], 2.0 * num_bytes, settings)
    name = f"device to device copy of {num_bytes / 2**30:.3g} GiB, read + written"
    return {"name": name, "rate": rate, "unit": "TB/s", "method": method}


def _matmul(settings: Settings) -> dict[str, Any]:
    size = 128 if settings.quick else 8192
    a, b = (torch.randn(size, size, device=settings.device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    rate, method = _rate([lambda: torch.matmul(a, b, out=out)], 2.0 * size**3, settings)
    name = f"matmul {size}^3 bfloat16, random numbers"
    return {"name": name, "rate": rate, "unit": "TFLOP/s", "method": method}


def _rate(calls: list[Callable[[], Any]], work: float, settings: Settings) -> tuple[float, str]:
    """The best way to time it: a graph's copy need not be the one that a stream gets."""
    ways = [timers.of_torch(calls, settings.device)]
    if settings.cuda:
        ways.append(timers.EventTimer(calls))
    seconds = [statistics.median(way.sample() for _ in range(settings.rounds)) for way in ways]
    best = min(range(len(ways)), key=seconds.__getitem__)
    return work / seconds[best] / 1e12, ways[best].method
