"""The front ends: three ways to run the same step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Protocol

import torch

from flashxla.generate.batch import StepInputs, padding_inputs, token_buckets
from flashxla.generate.errors import GenerateError
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
        self._caches = [(k.to(device), v.to(device)) for k, v in new_caches(loaded.layers, limits)]

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
        self._torch_xla = _import_torch_xla()
        # What PyTorch itself does with float32; XLA's default on a GPU is TF32.
        # (torch_xla.backends has a function for it, which always warns.)
        self._torch_xla._XLAC._xla_set_mat_mul_precision("highest")
        device = self._torch_xla.device()
        self._device = device
        self.device = self._torch_xla._XLAC._xla_get_devices()[0]
        self._model = move(loaded.model, device)
        self._caches = [(k.to(device), v.to(device)) for k, v in new_caches(loaded.layers, limits)]
        self._step: Callable[..., torch.Tensor] = functools.partial(run_step, self._model)
        self._torch_xla.sync()
        self._programs_before = _compile_count()

    @torch.no_grad()
    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Run a step. Returns the logits [S, V] on the CPU, float32."""
        logits = self._step(inputs.to(self._device), self._caches)
        # One program holds the whole step, the cache updates with it.
        self._torch_xla.sync()
        return logits.cpu().float()

    def compiled_programs(self) -> int:
        """How many programs XLA has compiled since this runner was made."""
        return _compile_count() - self._programs_before


class OpenXlaRunner(LazyRunner):
    """torch.compile with the openxla backend: traced once a shape, then called without tracing."""

    def __init__(self, loaded: LoadedModel, limits: Limits) -> None:
        super().__init__(loaded, limits)
        self._step = torch.compile(self._step, backend="openxla", dynamic=False, fullgraph=True)


def _import_torch_xla() -> ModuleType:
    try:
        import torch_xla
    except ImportError as error:
        raise GenerateError(
            "--frontend: lazy and openxla need PyTorch/XLA: pip install 'flashxla[torch-xla]'; "
            "--frontend torch does without"
        ) from error
    return torch_xla


def xla_is_cpu() -> bool:
    """Whether PyTorch/XLA's device is a CPU. Raises GenerateError where it is not installed."""
    _import_torch_xla()
    import torch_xla.runtime

    return torch_xla.runtime.device_type() == "CPU"


def _compile_count() -> int:
    from torch_xla.debug import metrics

    data = metrics.metric_data("CompileTime")
    return 0 if data is None else int(data[0])


FRONTENDS: dict[str, Callable[[LoadedModel, Limits], Runner]] = {
    "lazy": LazyRunner,
    "openxla": OpenXlaRunner,
    "torch": TorchRunner,
}


def warm_up(runner: Runner, limits: Limits) -> None:
    """Run every shape once, so that all compiling is done before the first token."""
    for bucket in token_buckets(limits):
        runner.run(padding_inputs(limits, bucket))
