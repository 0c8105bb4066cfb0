"""Profilers for a process of PyTorch/XLA, as contexts that record into a folder."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager, suppress


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

    if _plugin_versions() != {jaxlib.__version__}:
        raise RuntimeError(f"the plugin's version is not that of jaxlib, {jaxlib.__version__}")
    jax.devices()  # finds the plugins, and tells JAX's profiler of theirs
    with jax.profiler.trace(folder):
        yield


def _plugin_versions() -> set[str]:
    """Of the packages that bring the plugin."""
    found = set()
    for package in ("jax-cuda12-pjrt", "jax-cuda13-pjrt"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found.add(importlib.metadata.version(package))
    return found
