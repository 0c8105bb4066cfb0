"""Which kernels a JAX program runs on the GPU, and how long each takes: CUPTI sees them all, whoever launches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from flashxla.bench.gpu.compare import Row, first_line

_SHOWN = 15
_RUNS = 5


def row(case: str, dtype: str, name: str, dispatch: Callable[[], Any], calls: int) -> Row:
    """A row with the kernels of a program of `calls` calls; us: the kernels' time a call."""
    found: Row = {"case": case, "dtype": dtype, "contender": f"kernels of {name}", "derived": True}
    try:
        kernels = _kernels(dispatch)
    except Exception as error:  # a profiler that does not work is no reason to lose the figures
        return {**found, "failed": first_line(error)}
    found["us"] = sum(kernel["us"] for kernel in kernels) / calls
    found["launches"] = sum(kernel["launches"] for kernel in kernels) / calls
    found["kernels"] = kernels[:_SHOWN]
    for kernel in kernels[:_SHOWN]:
        print(f"    {kernel['us']:.1f} us, {kernel['launches']:g} x {kernel['name'][:90]}", file=sys.stderr)
    return found


def _kernels(dispatch: Callable[[], Any]) -> list[dict[str, Any]]:
    """The kernels of one dispatch, the longest first."""
    import jax
    from torch.profiler import ProfilerActivity, profile

    jax.block_until_ready(dispatch())
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(_RUNS):
            last = dispatch()
        jax.block_until_ready(last)
    kernels = [
        {"name": event.key, "us": event.self_device_time_total / _RUNS, "launches": event.count / _RUNS}
        for event in profiler.key_averages()
        if event.self_device_time_total > 0
    ]
    if not kernels:
        raise RuntimeError("the profiler saw no kernel")
    return sorted(kernels, key=lambda kernel: -kernel["us"])
