"""Timing: samples of several runs taken in turn, so that a machine's mood meets all of them alike."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping

MIN_SAMPLE_SECONDS = 0.05

Samples = dict[str, list[float]]


def sample(run: Callable[[], object], min_seconds: float = MIN_SAMPLE_SECONDS) -> float:
    """Seconds a call, from calls of at least `min_seconds` after a warm-up. PyTorch's timer waits for a GPU."""
    import torch
    from torch.utils.benchmark import Timer

    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=min_seconds).median)


def interleave(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    min_seconds: float,
    sample: Callable[[Callable[[], object], float], float] = sample,
) -> Samples:
    """`rounds` samples of each run, every round one of each.

    Rounds start at another run each, so that none always follows the same one.
    """
    samples: Samples = {name: [] for name in runs}
    order = deque(runs)
    for _ in range(rounds):
        for name in order:
            samples[name].append(sample(runs[name], min_seconds))
        order.rotate(-1)
    return samples


def paired_ratio(numerators: list[float], denominators: list[float]) -> float:
    """The median of the ratios of samples that were taken in one round."""
    return statistics.median(n / d for n, d in zip(numerators, denominators, strict=True))
