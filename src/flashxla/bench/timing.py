"""Timing: samples of several runs taken in turn, so that a machine's mood meets all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

MIN_SAMPLE_SECONDS = 0.05
_MAX_CALLS = 100_000

Samples = dict[str, list[float]]


def calls_for(run: Callable[[], object], min_seconds: float, sync: Callable[[], None]) -> int:
    """How many calls make a sample of at least `min_seconds`; warms up on the way."""
    run()
    calls = 1
    while True:
        seconds = _sample(run, calls, sync) * calls
        if seconds >= min_seconds or calls >= _MAX_CALLS:
            return calls
        # A tenth more than the estimate; at most ten times more, since a first call may be a slow one.
        calls = min(_MAX_CALLS, 10 * calls, int(1.1 * calls * min_seconds / max(seconds, 1e-9)) + 1)


def interleave(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    min_seconds: float = MIN_SAMPLE_SECONDS,
    sync: Callable[[], None] = lambda: None,
) -> Samples:
    """Seconds a call of each run: `rounds` samples of each, every round one of each.

    Rounds start at another run each, so that none always follows the same one. sync: waits for the device.
    """
    calls = {name: calls_for(run, min_seconds, sync) for name, run in runs.items()}
    names = list(runs)
    samples: Samples = {name: [] for name in names}
    for i in range(rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(_sample(runs[name], calls[name], sync))
    return samples


def _sample(run: Callable[[], object], calls: int, sync: Callable[[], None]) -> float:
    sync()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    sync()
    return (time.perf_counter() - start) / calls


def paired_ratio(numerators: list[float], denominators: list[float]) -> float:
    """The median of the ratios of samples that were taken in one round."""
    return statistics.median(n / d for n, d in zip(numerators, denominators, strict=True))
