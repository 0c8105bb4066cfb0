"""The front ends: ways to run the same step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import torch

from flashxla.generate import xla_device
from flashxla.generate.batch import StepInputs, padding_inputs, token_buckets
from flashxla.generate.errors import GenerateError, describe
from flashxla.generate.model import LoadedModel, move, new_caches, run_step
from flashxla.generate.scheduler import Limits


class Runner(Protocol):
    """Runs steps on some device. It takes the loaded model over and moves it there."""

    device: str

    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Run a step. Returns the logits [S, V] on the CPU, float32."""
        ...

    def compiled_programs(self) -> int | None:
        """How many programs XLA has compiled for this process; None where nothing is compiled."""
        ...


class TorchRunner:
    """Plain PyTorch, without XLA."""

    def __init__(self, loaded: LoadedModel, limits: Limits, device: str = "cpu") -> None:
        self.device = device
        self._model = move(loaded.model, device)
        self._caches = new_caches(loaded.layers, limits, device)

    @torch.no_grad()
    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Run a step. Returns the logits [S, V] on the CPU, float32."""
        return run_step(self._model, inputs.to(self.device), self._caches).float().cpu()

    def compiled_programs(self) -> None:
        """Nothing is compiled."""
        return None


class LazyRunner:
    """PyTorch/XLA's lazy tensors: the step is traced each time, its program compiled once a shape."""

    def __init__(self, loaded: LoadedModel, limits: Limits) -> None:
        self._torch_xla = xla_device.start()
        # What PyTorch itself does with float32; XLA's default on a GPU is TF32.
        # (torch_xla.backends has a function for it, which always warns.)
        self._torch_xla._XLAC._xla_set_mat_mul_precision("highest")
        device = self._torch_xla.device()
        self._device = device
        self.device = self._torch_xla._XLAC._xla_get_devices()[0]
        self._model = move(loaded.model, device)
        self._caches = new_caches(loaded.layers, limits, device)
        self._step: Callable[..., torch.Tensor] = functools.partial(run_step, self._model)
        self._torch_xla.sync()
        self._programs_before = xla_device.compile_count()

    @torch.no_grad()
    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Run a step. Returns the logits [S, V] on the CPU, float32."""
        logits = self._step(inputs.to(self._device), self._caches)
        # One program holds the whole step, the cache updates with it.
        self._torch_xla.sync()
        return logits.cpu().float()

    def compiled_programs(self) -> int:
        """How many programs XLA has compiled since this runner was made."""
        return xla_device.compile_count() - self._programs_before


class OpenXlaRunner(LazyRunner):
    """torch.compile with the openxla backend: traced once a shape, then called without tracing."""

    def __init__(self, loaded: LoadedModel, limits: Limits) -> None:
        super().__init__(loaded, limits)
        self._step = torch.compile(self._step, backend="openxla", dynamic=False, fullgraph=True)

    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Run a step. Returns the logits [S, V] on the CPU, float32."""
        try:
            return super().run(inputs)
        except torch._dynamo.exc.Unsupported as error:
            raise GenerateError(
                "--frontend: got openxla with a model that torch.compile cannot make one program of: "
                f"{describe(error)}; accepted: --frontend lazy or torch with this model"
            ) from error


def warm_up(runner: Runner, limits: Limits) -> None:
    """Run every shape once, so that all compiling is done before the first token."""
    for bucket in token_buckets(limits):
        runner.run(padding_inputs(limits, bucket))
