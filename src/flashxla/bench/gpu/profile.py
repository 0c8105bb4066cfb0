"""Which kernels a program runs on the GPU, how long each takes, and how long the device waits between them."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from flashxla.bench.gpu import timeline
from flashxla.bench.gpu.compare import Row, first_line

_SHOWN = 15
_RUNS = 8

# Records what happens inside it into a folder.
Tracer = Callable[[str], AbstractContextManager[Any]]


def title(name: str) -> str:
    """What a contender's row is called."""
    return f"kernels of {name}"


def row(
    case: str,
    dtype: str,
    name: str,
    dispatch: Callable[[], Any],
    calls: int,
    wait: Callable[[Any], Any] | None = None,
    tracers: Sequence[Tracer] = (),
) -> Row:
    """A row with the kernels of a program of `calls` calls; us: the kernels' time a call.

    wait, tracers: of the framework that runs the program, the first tracer that sees a kernel; JAX's if left out.
    """
    found: Row = {"case": case, "dtype": dtype, "contender": title(name), "derived": True}
    try:
        events = _events(dispatch, wait, tracers)
    except Exception as error:  # a profiler that does not work is no reason to lose the figures
        return {**found, "failed": first_line(error)}
    kernels = timeline.kernels(events, _RUNS)
    steps = timeline.of_steps(events, _RUNS)
    facts = steps.facts
    found["us"] = sum(kernel["us"] for kernel in kernels) / calls
    found["launches"] = steps.launches / calls
    found["timeline"] = facts
    found["largest_gap"] = facts["largest_gap"]
    found["kernels"] = kernels[:_SHOWN]
    print(
        f"    {name}: {steps.us:.0f} us on the device, busy {steps.busy:.0%}, {steps.launches:g} kernels, "
        f"largest gap {steps.largest_gap_us:.1f} us ({facts['largest_gap']:.1%}), "
        f"{steps.gap_between_us:.1f} us before the next",
        file=sys.stderr,
    )
    for kernel in kernels[:_SHOWN]:
        print(f"    {kernel['us']:.1f} us, {kernel['launches']:g} x {kernel['name'][:90]}", file=sys.stderr)
    return found


def _events(
    dispatch: Callable[[], Any], wait: Callable[[Any], Any] | None, tracers: Sequence[Tracer]
) -> list[timeline.Event]:
    """What the device did in _RUNS dispatches."""
    if wait is None or not tracers:
        import jax

        wait, tracers = wait or jax.block_until_ready, tracers or (jax.profiler.trace,)
    problems = []
    for tracer in tracers:
        wait(dispatch())
        with tempfile.TemporaryDirectory() as folder:
            try:
                with tracer(folder):
                    for _ in range(_RUNS):
                        last = dispatch()
                    wait(last)
                return timeline.read(folder)
            except Exception as error:  # the next one may see what this one does not
                problems.append(first_line(error))
    raise RuntimeError("; ".join(problems))
