"""What the runner needs of a framework."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from flashxla.bench import timing
from flashxla.bench.topic import Options


class Framework(Protocol):
    """Made of the options of a run."""

    def seed(self) -> None:
        """Make the next problem's tensors the same ones each time."""

    def dtype(self, name: str) -> Any:
        """What topics take as a dtype."""

    def device(self, name: str) -> Any:
        """What topics take as a device."""

    def sample(self, run: Callable[[], object], min_seconds: float) -> float:
        """Seconds a call, from calls of at least `min_seconds` after a warm-up."""

    def difference(self, a: Any, b: Any, atol: float, rtol: float) -> float:
        """The largest difference of two tensors. Raises AssertionError if they are not close."""


class Torch:
    """PyTorch."""

    def __init__(self, options: Options) -> None:
        import torch

        torch.set_num_threads(options.threads)
        self._torch = torch

    def seed(self) -> None:
        """See Framework."""
        self._torch.manual_seed(0)

    def dtype(self, name: str) -> Any:
        """See Framework."""
        return getattr(self._torch, name)

    def device(self, name: str) -> Any:
        """See Framework."""
        return self._torch.device(name)

    def sample(self, run: Callable[[], object], min_seconds: float) -> float:
        """See Framework."""
        return timing.sample(run, min_seconds)

    def difference(self, a: Any, b: Any, atol: float, rtol: float) -> float:
        """See Framework."""
        self._torch.testing.assert_close(a, b, atol=atol, rtol=rtol)
        return float((a.float() - b.float()).abs().max())


class Jax:
    """JAX; calls wait for their results."""

    def __init__(self, options: Options) -> None:
        import jax

        self._jax = jax

    def seed(self) -> None:
        """Nothing to do: JAX's problems have generators of their own."""

    def dtype(self, name: str) -> Any:
        """See Framework."""
        return self._jax.numpy.dtype(name)

    def device(self, name: str) -> Any:
        """See Framework."""
        return self._jax.devices(name)[0]

    def sample(self, run: Callable[[], object], min_seconds: float) -> float:
        """See Framework."""
        return sample_loop(run, min_seconds)

    def difference(self, a: Any, b: Any, atol: float, rtol: float) -> float:
        """See Framework."""
        import numpy as np

        a, b = (np.asarray(x).astype(np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, atol=atol, rtol=rtol)
        return float(np.abs(a - b).max())


def sample_loop(run: Callable[[], object], min_seconds: float) -> float:
    """Seconds a call of a function that waits for its result."""
    run()
    count = 1
    while True:
        start = time.perf_counter()
        for _ in range(count):
            run()
        seconds = time.perf_counter() - start
        if seconds >= min_seconds:
            return seconds / count
        # A tenth more than it should take, at most ten times as many.
        count = min(10 * count, 1 + int(1.1 * count * min_seconds / max(seconds, 1e-9)))


FRAMEWORKS: dict[str, Callable[[Options], Framework]] = {"torch": Torch, "jax": Jax}
