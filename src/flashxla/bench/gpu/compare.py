"""Checks the contenders of a case, times them in turn, and makes rows of the report."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from flashxla.bench.gpu.settings import Settings
from flashxla.bench.gpu.timers import Timer

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Work:
    """What one call must do: in the unit by its scale, held against a ceiling ("copy", "matmul")."""

    amount: float
    unit: str
    ceiling: str
    scale: float = 1e12


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A contender on its tensors. check: raises if the result is wrong, else returns its error."""

    check: Callable[[], float]
    timer: Callable[[], Timer]
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Contender:
    """Something that can do the work of a case; preparing it may raise."""

    name: str
    prepare: Callable[[], Prepared]
    ours: bool = False
    work: Work | None = None  # if not the case's


def run(
    case: str, dtype: str, contenders: Iterable[Contender], settings: Settings, work: Work | None = None
) -> Iterator[Row]:
    """A row for each contender: its time, or why there is none.

    Rows {"begin": name} say between them what is going on, for those who watch.
    """
    timers: dict[str, Timer] = {}
    rows: dict[str, Row] = {}
    works: dict[str, Work | None] = {}
    for contender in contenders:
        if (case, contender.name) in settings.avoid:
            continue
        yield {"begin": contender.name}
        works[contender.name] = contender.work or work
        row: Row = {"case": case, "dtype": dtype, "contender": contender.name, "ours": contender.ours}
        rows[contender.name] = row
        try:
            prepared = contender.prepare()
            row["error"] = prepared.check()
            timers[contender.name] = timer = prepared.timer()
            row["method"] = timer.method
            if prepared.note:
                row["note"] = prepared.note
        except Exception as error:  # whatever a contender dies of is its result
            row["failed"] = first_line(error)
            if device_is_lost(settings):
                yield {**row, "lost": True}
                raise
    yield {"begin": "timing"}
    passes = [_pass(timers, settings.rounds) for _ in range(2)]
    for name, row in rows.items():
        if name in timers:
            samples = [one[name] for one in passes]
            row.update(figures(samples, works[name]))
        print(f"  {described(row)}", file=sys.stderr, flush=True)
        yield row


def _pass(timers: dict[str, Timer], rounds: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            samples[name].append(timer.sample())
    return samples


def figures(passes: list[list[float]], work: Work | None) -> Row:
    """The median; how far the medians of two equal passes are apart; the rate."""
    seconds = statistics.median([sample for samples in passes for sample in samples])
    medians = [statistics.median(samples) for samples in passes]
    row: Row = {
        "us": seconds * 1e6,
        "passes_us": [median * 1e6 for median in medians],
        "spread": max(medians) / min(medians) - 1,
        "samples": sum(map(len, passes)),
    }
    if work is not None:
        row.update(rate=work.amount / seconds / work.scale, unit=work.unit, ceiling=work.ceiling)
    return row


def described(row: Row) -> str:
    """A row as a line."""
    if "failed" in row:
        return f"{row['contender']}: not measured: {row['failed']}"
    rate = f" ({row['rate']:.3g} {row['unit']})" if "rate" in row else ""
    return f"{row['contender']}: {row['us']:.4g} us{rate}"


def first_line(error: BaseException) -> str:
    """What an exception says."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def device_is_lost(settings: Settings) -> bool:
    """Whether a kernel did something after which this process can use the GPU no more."""
    if not settings.cuda:
        return False
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.zeros(1, device="cuda").item()
        else:
            import jax.numpy as jnp

            jnp.zeros(1).block_until_ready()
    except RuntimeError:
        return True
    return False


def free_memory(settings: Settings) -> None:
    """Give back what the last case held."""
    gc.collect()
    if settings.cuda and torch.cuda.is_available():
        torch.cuda.empty_cache()
