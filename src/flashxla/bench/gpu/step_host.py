"""What a step costs the host: the time until its call returns, with nobody waiting for the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

_SAMPLES = 15
# So few that their kernels do not fill the queue of launches, which would make the host wait.
_STEPS = 2


def measure(run: Callable[[], Any], wait: Callable[[Any], Any]) -> dict[str, float]:
    """Microseconds a step, each sample begun on an idle device.

    host_us: on the clock, so with what the thread waits for in the runtime. host_cpu_us: the time that the calling
    thread computes: Python, and what it calls in C++.
    """
    wall, computing = [], []
    wait(run())
    for _ in range(_SAMPLES):
        start, own_start = time.perf_counter(), time.thread_time()
        for _ in range(_STEPS):
            last = run()
        wall.append((time.perf_counter() - start) / _STEPS)
        computing.append((time.thread_time() - own_start) / _STEPS)
        wait(last)
    return {"host_us": statistics.median(wall) * 1e6, "host_cpu_us": statistics.median(computing) * 1e6}
