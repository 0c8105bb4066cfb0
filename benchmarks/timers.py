"""How a contender is timed: seconds a call, from one sample."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

MIN_CALLS = 10
_MAX_CALLS = 1000
_GRAPH_SECONDS = 2e-3  # of one graph: then the launch of the next one does not matter
_SAMPLE_SECONDS = 4e-3
# Keeps the device busy while the host queues a sample, about a millisecond.
_HEAD_START_CYCLES = 2_000_000


class Timer(Protocol):
    """Takes samples."""

    method: str

    def sample(self) -> float:
        """Seconds a call."""


def of_torch(calls: Sequence[Callable[[], Any]], device: str) -> Timer:
    """Calls that are alike but for their inputs; they take turns."""
    if device == "cpu":
        return WallTimer(calls)
    try:
        return GraphTimer(calls)
    except RuntimeError as error:
        torch.cuda.synchronize()
        return EventTimer(calls, str(error).strip().splitlines()[0])


def rotation(num_calls: int, seconds: float) -> int:
    """How many calls make a graph: whole rounds of the input sets, long enough."""
    wanted = min(_MAX_CALLS, max(MIN_CALLS, math.ceil(_GRAPH_SECONDS / max(seconds, 1e-7))))
    return math.ceil(wanted / num_calls) * num_calls


class GraphTimer:
    """CUDA events around replays of a CUDA graph of many calls: the device's time, without the host's."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self._calls = calls  # a graph holds addresses, not tensors
        self._capture(calls, rotation(len(calls), _warm_up(calls)))
        seconds = _between_events(self._graph.replay, 2) / self._count
        # The first estimate may have been the host's time.
        if rotation(len(calls), seconds) > 1.5 * self._count:
            self._capture(calls, rotation(len(calls), seconds))
        self._replays = max(1, math.ceil(_SAMPLE_SECONDS / max(seconds * self._count, 1e-7)))
        self.method = f"CUDA graph of {self._count} calls on {len(calls)} input sets, events"

    def _capture(self, calls: Sequence[Callable[[], Any]], count: int) -> None:
        self._count = count
        self._graph = torch.cuda.CUDAGraph()
        # thread_local: threads of JAX may free memory meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            for i in range(count):
                self.last = calls[(i + 1) % len(calls)]()  # in the end, what the first call gives
        self._graph.replay()
        self._graph.replay()
        torch.cuda.synchronize()

    def sample(self) -> float:
        """Seconds a call."""
        return _between_events(self._graph.replay, self._replays) / self._count


class EventTimer:
    """CUDA events around calls from the host: where that is slower than the device, its time is in the result."""

    def __init__(self, calls: Sequence[Callable[[], Any]], why: str = "") -> None:
        self._calls = calls
        self._rounds = max(1, math.ceil(max(MIN_CALLS, _SAMPLE_SECONDS / _warm_up(calls)) / len(calls)))
        self.method = "CUDA events around calls from the host" + (f" (no CUDA graph: {why})" if why else "")

    def sample(self) -> float:
        """Seconds a call."""
        return _between_events(self._round, self._rounds) / len(self._calls)

    def _round(self) -> None:
        for call in self._calls:
            call()


class WallTimer:
    """The clock on the wall, for the CPU."""

    method = "wall clock"

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self._calls = calls
        for call in calls:
            call()

    def sample(self) -> float:
        """Seconds a call."""
        start = time.perf_counter()
        for call in self._calls:
            call()
        return (time.perf_counter() - start) / len(self._calls)


def _warm_up(calls: Sequence[Callable[[], Any]]) -> float:
    """Runs everything on a side stream, as capturing wants it. Returns roughly the seconds of a call."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            for call in calls:
                call()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for call in calls:
            call()
        end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / len(calls)


def _between_events(run: Callable[[], Any], times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / times


class ProgramTimer:
    """A program of several calls, dispatched again and again; the host waits at the end only.

    run: dispatches it once on the results of the last time, and returns what to wait for.
    wait: JAX's if left out.
    """

    def __init__(
        self,
        run: Callable[[], Any],
        calls: int,
        seconds: float = 20e-3,
        wait: Callable[[Any], Any] | None = None,
        program: str = "jitted program",
    ) -> None:
        if wait is None:
            import jax

            wait = jax.block_until_ready
        self._run, self._calls, self._wait = run, calls, wait
        self._wait(run())
        start = time.perf_counter()
        self._wait(run())
        self._dispatches = max(2, min(200, math.ceil(seconds / (time.perf_counter() - start))))
        one = "one call" if calls == 1 else f"{calls} chained calls"
        self.method = f"{program} of {one}, {self._dispatches} dispatched, wall clock"

    def sample(self) -> float:
        """Seconds a call."""
        start = time.perf_counter()
        for _ in range(self._dispatches):
            last = self._run()
        self._wait(last)
        return (time.perf_counter() - start) / (self._dispatches * self._calls)


# So few steps that their kernels do not fill the queue of launches, which would make the host wait.
_HOST_SAMPLES, _HOST_STEPS = 15, 2


def host_time(
    run: Callable[[], Any], wait: Callable[[Any], Any], steps: int = _HOST_STEPS
) -> dict[str, float]:
    """Microseconds until a call returns, with nobody waiting for the device; each sample begins on an idle one.

    host_us: on the clock, so with what the thread waits for in the runtime. host_cpu_us: the time that the calling
    thread computes: Python, and what it calls in C++.
    """
    wall, computing = [], []
    wait(run())
    for _ in range(_HOST_SAMPLES):
        start, own_start = time.perf_counter(), time.thread_time()
        for _ in range(steps):
            last = run()
        wall.append((time.perf_counter() - start) / steps)
        computing.append((time.thread_time() - own_start) / steps)
        wait(last)
    return {"host_us": statistics.median(wall) * 1e6, "host_cpu_us": statistics.median(computing) * 1e6}
