"""Checks the contenders of a case, times them in turn, and makes rows of the report."""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from benchmarks import device
from benchmarks.settings import Settings
from benchmarks.timers import Timer

Row = dict[str, Any]


class WrongResult(RuntimeError):
    """A contender does not compute what it should."""


class DeviceLost(RuntimeError):
    """A contender left a GPU that this process can use no more."""


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

    Rows {"begin": [name, whether it is ours]} say between them what is going on, for those who watch.
    """
    timers: dict[str, Timer] = {}
    rows: dict[str, Row] = {}
    works: dict[str, Work | None] = {}
    for contender in contenders:
        if (case, contender.name) in settings.avoid:
            continue
        yield {"begin": [contender.name, contender.ours]}
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
            if device.is_lost(settings):
                raise DeviceLost(row["failed"]) from error
    yield {"begin": ["timing", False]}
    passes = [_pass(timers, settings.rounds) for _ in range(2)]
    for name, row in rows.items():
        if name in timers:
            samples = [one[name] for one in passes]
            row.update(figures(samples, works[name]))
        print(f"  {_described(row)}", file=sys.stderr, flush=True)
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


def derived(case: str, settings: Settings, contender: str, us: float) -> Row:
    """A row that was computed from others."""
    row: Row = {"case": case, "dtype": settings.dtype, "contender": contender, "ours": False}
    return {**row, "us": us, "derived": True}


def _described(row: Row) -> str:
    if "failed" in row:
        return f"{row['contender']}: not measured: {row['failed']}"
    rate = f" ({row['rate']:.3g} {row['unit']})" if "rate" in row else ""
    return f"{row['contender']}: {row['us']:.4g} us{rate}"


def first_line(error: BaseException) -> str:
    """What an exception says."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]
