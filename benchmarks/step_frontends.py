"""PyTorch's front ends of XLA, for the section step: where tensors live, and how a step is made a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import flashxla
from benchmarks import llama, profile
from benchmarks.settings import Settings
from flashxla.xla import pjrt_adapter

Step = Callable[..., Any]


class Frontend:
    """The protocol, with what most have in common."""

    device: Any
    tracers: Sequence[profile.Tracer] = (profile.by_jax,)
    program: str  # what a timer's method calls it
    has_eager = False  # whether an operation that is called by itself runs at once

    def sync(self) -> None:
        """Hand over what has been called so far."""

    def ready(self, step: Step) -> Step:
        """A step of (params, caches, tokens, batch) that returns when its program has been handed to the device."""
        raise NotImplementedError

    def cpu(self, tensor: Any) -> torch.Tensor:
        """The same numbers on the CPU."""
        return tensor.cpu()

    def wait(self, tokens: Any) -> None:
        """Until they are there: a few numbers cross to the host."""
        tokens.cpu()

    def compiled(self) -> int:
        """How many programs have been compiled for steps so far."""
        raise NotImplementedError

    def executions(self, run: Callable[[], None]) -> int:
        """How many programs run in a call that waits for its steps."""
        raise NotImplementedError


class _TorchXla(Frontend):
    tracers = (profile.by_jax, profile.by_torch_xla)
    program = "PyTorch/XLA program"

    def __init__(self, settings: Settings) -> None:
        import torch_xla

        self._torch_xla = torch_xla
        self.device = torch_xla.device()

    def sync(self) -> None:
        self._torch_xla.sync(wait=True)

    def compiled(self) -> int:
        return self._count("CompileTime")

    def executions(self, run: Callable[[], None]) -> int:
        before = self._count("ExecuteTime")
        run()
        return self._count("ExecuteTime") - before

    def _count(self, metric: str) -> int:
        from torch_xla.core import xla_model
        from torch_xla.debug import metrics

        xla_model.wait_device_ops()  # a program is counted a little after its results are there
        data = metrics.metric_data(metric)
        return 0 if data is None else int(data[0])


class Lazy(_TorchXla):
    """Traced each time."""

    def ready(self, step: Step) -> Step:
        def lazy(*args: Any) -> Any:
            result = step(*args)
            self._torch_xla.sync()
            return result

        return lazy


class OpenXla(_TorchXla):
    """torch.compile: traced once."""

    def ready(self, step: Step) -> Step:
        return torch.compile(step, backend="openxla", dynamic=False, fullgraph=True)


class TorchTpu(Frontend):
    """torch.compile with TorchTPU."""

    device = "tpu"
    program = "TorchTPU program"
    has_eager = True

    def __init__(self, settings: Settings) -> None:
        if settings.cuda:
            flashxla.use_gpu()
        else:
            flashxla.use_cpu()
        from flashxla.xla.torch_tpu_graphs import CountingBackend

        self._backend = CountingBackend()

    def sync(self) -> None:
        torch.accelerator.synchronize()

    def ready(self, step: Step) -> Step:
        return torch.compile(step, backend=self._backend, dynamic=False, fullgraph=True)

    def compiled(self) -> int:
        return self._backend.graphs

    def executions(self, run: Callable[[], None]) -> int:
        with pjrt_adapter.load().watch_inputs() as seen:
            run()
        return len(seen)


class Torchax(Frontend):
    """jax.jit by torchax, with donated caches."""

    device = "jax"
    program = "torchax program"
    has_eager = True
    tracers = ()  # JAX's usual one

    def __init__(self, settings: Settings) -> None:
        import torchax

        import flashxla.torchax

        flashxla.torchax.register()
        torchax.enable_globally()
        self._run = 0

    def ready(self, step: Step) -> Step:
        import jax
        from torchax import interop

        def program(caches: Any, params: Any, tokens: Any, batch: Any) -> Any:
            return step(params, caches, tokens, batch), caches

        self._jitted: Any = jax.jit(interop.jax_view(program), donate_argnums=0)
        jitted = interop.torch_view(self._jitted)

        def called(params: Any, caches: Any, tokens: Any, batch: Any) -> Any:
            self._run += 1
            result, caches[:] = jitted(caches, params, tokens, batch)
            return result

        return called

    def cpu(self, tensor: Any) -> torch.Tensor:
        return tensor.torch()

    def wait(self, tokens: Any) -> None:
        tokens.jax().block_until_ready()

    def compiled(self) -> int:
        return self._jitted._cache_size()

    def executions(self, run: Callable[[], None]) -> int:
        before = self._run
        run()
        return self._run - before


_FRONTENDS: dict[str, Callable[[Settings], Frontend]] = {
    llama.LAZY: Lazy,
    llama.OPENXLA: OpenXla,
    llama.TORCHTPU: TorchTpu,
    llama.TORCHAX: Torchax,
}


def start(name: str, settings: Settings) -> Frontend:
    """The front end of this process."""
    return _FRONTENDS[name](settings)
