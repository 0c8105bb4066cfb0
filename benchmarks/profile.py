"""Which kernels a program runs on the GPU, how long each takes, and how long the device waits between them."""

from __future__ import annotations

import importlib.metadata
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from benchmarks import compare, timeline
from benchmarks.compare import Row
from benchmarks.settings import Settings

_SHOWN = 15
_RUNS = 8

# Records what happens inside it into a folder.
Tracer = Callable[[str], AbstractContextManager[Any]]


def title(name: str) -> str:
    """What a contender's row is called."""
    return f"kernels of {name}"


def row(
    case: str,
    settings: Settings,
    name: str,
    dispatch: Callable[[], Any],
    calls: int = 1,
    wait: Callable[[Any], Any] | None = None,
    tracers: Sequence[Tracer] = (),
) -> Row:
    """A row with the kernels of a program of `calls` calls; us: the kernels' time a call.

    wait, tracers: of the framework that runs the program, the first tracer that sees a kernel; JAX's if left out.
    """
    try:
        events = _events(dispatch, wait, tracers)
    except Exception as error:  # a profiler that does not work is no reason to lose the figures
        failed = compare.derived(case, settings, title(name), 0.0)
        del failed["us"]
        return {**failed, "failed": compare.first_line(error)}
    kernels = timeline.kernels(events, _RUNS)
    steps = timeline.of_steps(events, _RUNS)
    facts = steps.facts
    print(
        f"    {name}: {steps.us:.0f} us on the device, busy {steps.busy:.0%}, {steps.launches:g} kernels, "
        f"largest gap {steps.largest_gap_us:.1f} us ({facts['largest_gap']:.1%}), "
        f"{steps.gap_between_us:.1f} us before the next",
        file=sys.stderr,
    )
    for kernel in kernels[:_SHOWN]:
        print(f"    {kernel['us']:.1f} us, {kernel['launches']:g} x {kernel['name'][:90]}", file=sys.stderr)
    return {
        **compare.derived(case, settings, title(name), sum(kernel["us"] for kernel in kernels) / calls),
        "launches": steps.launches / calls,
        "timeline": facts,
        "largest_gap": facts["largest_gap"],
        "kernels": kernels[:_SHOWN],
    }


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
                problems.append(compare.first_line(error))
    raise RuntimeError("; ".join(problems))


@contextmanager
def by_torch_xla(folder: str) -> Iterator[None]:
    """PyTorch/XLA's own, which asks the PJRT plugin for the device's part."""
    from torch_xla.debug import profiler

    profiler.start_trace(folder)
    try:
        yield
    finally:
        profiler.stop_trace()


@contextmanager
def by_jax(folder: str) -> Iterator[None]:
    """JAX's: the plugin's CUDA profiler sees all of this process, whoever launches; JAX needs no GPU for it.

    Raises RuntimeError where the plugin is of another version than jaxlib: their profilers' structs may differ,
    which ends the process.
    """
    import jax
    import jaxlib

    versions = set()
    for package in ("jax-cuda12-pjrt", "jax-cuda13-pjrt"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.add(importlib.metadata.version(package))
    if versions != {jaxlib.__version__}:
        raise RuntimeError(f"the plugin's version is not that of jaxlib, {jaxlib.__version__}")
    jax.devices()  # finds the plugins, and tells JAX's profiler of theirs
    with jax.profiler.trace(folder):
        yield
