"""The device's timeline in a profile: when it worked, when it waited, and on what it worked."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_DEVICE_PLANE = "/device:GPU:"
_STREAM = "Stream"  # how the lines begin that hold what ran; others say the same by module, by operation


@dataclasses.dataclass(frozen=True, order=True)
class Event:
    """Something that the device did: a kernel, a copy."""

    start_ns: float
    end_ns: float
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Steps:
    """What steps that follow each other took from the device; medians over them but for the first.

    us: from a step's first kernel to the next one's. largest_gap_us: the longest time without a kernel, the wait
    for the next step included, which is also given by itself (gap_between_us).
    """

    us: float
    busy: float
    largest_gap_us: float
    gap_between_us: float
    launches: float

    @property
    def facts(self) -> dict[str, float]:
        """As a row has them."""
        share = self.largest_gap_us / self.us
        return {**dataclasses.asdict(self), "largest_gap": share}


def read(folder: str) -> list[Event]:
    """What the GPU did, in the order of its beginning, from the profile that a tracer left in a folder."""
    files = sorted(Path(folder).rglob("*.xplane.pb"))
    if not files:
        raise RuntimeError("the profiler wrote no profile")
    planes = [plane for file in files for plane in _planes(file)]
    events = [
        Event(event.start_ns, event.start_ns + event.duration_ns, event.name)
        for plane in planes
        if plane.name.startswith(_DEVICE_PLANE)
        for line in plane.lines
        if line.name.startswith(_STREAM)
        for event in line.events
    ]
    if not events:
        raise RuntimeError(f"no kernel in the profile; it has {', '.join(plane.name for plane in planes)}")
    return sorted(events)


def _planes(file: Path) -> list[Any]:
    from jax.profiler import ProfileData

    return list(ProfileData.from_file(str(file)).planes)


def of_steps(events: Sequence[Event], count: int) -> Steps:
    """What each of `count` steps took: they launch the same, so the events are shared out evenly.

    Events that there are fewer of than steps belong to none, such as the copy of what the host waits for in the end.
    Where the others do not divide, all of them are taken for one step, which is then a mean.
    """
    times = Counter(event.name for event in events)
    events = sorted(event for event in events if times[event.name] >= count)
    launches = len(events) / count
    if count < 3 or len(events) % count:
        span = max(event.end_ns for event in events) - events[0].start_ns
        busy, gaps = _busy_and_gaps(events)
        us = span / 1e3 / count
        return Steps(us, busy / span, max(gaps, default=0.0) / 1e3, 0.0, launches)
    size = len(events) // count
    # The first one starts on an idle device; the last one has no next.
    found = [_step(events[i : i + size + 1]) for i in range(size, len(events) - size, size)]
    us, busy, gap, between = (statistics.median(values) for values in zip(*found, strict=True))
    return Steps(us, busy, gap, between, launches)


def _step(events: Sequence[Event]) -> tuple[float, float, float, float]:
    """Of a step's events and the next one's first: us, busy, the largest gap and the one before the next step."""
    *own, following = events
    span = following.start_ns - own[0].start_ns
    busy, gaps = _busy_and_gaps(own)
    between = max(0.0, following.start_ns - max(event.end_ns for event in own))
    return span / 1e3, min(1.0, busy / span), max(between, *gaps, 0.0) / 1e3, between / 1e3


def _busy_and_gaps(events: Sequence[Event]) -> tuple[float, list[float]]:
    """How long at least one event was going on, and the times between."""
    busy, gaps, end = 0.0, [], events[0].start_ns
    for event in events:
        if event.start_ns > end:
            gaps.append(event.start_ns - end)
        busy += max(0.0, event.end_ns - max(end, event.start_ns))
        end = max(end, event.end_ns)
    return busy, gaps


def kernels(events: Sequence[Event], count: int) -> list[dict[str, Any]]:
    """By name, the longest first: microseconds and launches of one of `count` steps."""
    found: dict[str, list[float]] = defaultdict(list)
    for event in events:
        found[event.name].append((event.end_ns - event.start_ns) / 1e3)
    rows = [
        {"name": name, "us": sum(times) / count, "launches": len(times) / count}
        for name, times in found.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])
