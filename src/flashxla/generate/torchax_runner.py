"""torchax: the step as a program of JAX's, with donated caches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from flashxla import native
from flashxla.generate.batch import StepInputs
from flashxla.generate.errors import GenerateError, describe
from flashxla.generate.model import Caches, LoadedModel, new_caches, run_step
from flashxla.generate.scheduler import Limits


def start() -> bool:
    """Start torchax on JAX's device. Returns whether that is a CPU. Raises GenerateError."""
    try:
        import jax

        import flashxla.torchax

        platform = {"cpu": "cpu", "gpu": "cuda"}[jax.default_backend()]
        native.library(platform)
        flashxla.torchax.register()
    except (ImportError, RuntimeError, KeyError) as error:
        raise GenerateError(f"--frontend: torchax could not be started: {describe(error)}") from error
    return platform == "cpu"


@contextlib.contextmanager
def like_torch() -> Iterator[None]:
    """Integers of 64 bits, and products of float32 in float32."""
    import jax

    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        yield


class _Step(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: StepInputs, caches: Caches) -> torch.Tensor:
        """The logits."""
        return run_step(self.model, inputs, caches)  # type: ignore[arg-type]


def step_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a model by name, tied ones once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def step_program(model: torch.nn.Module) -> Callable[..., Any]:
    """The step as a function of JAX arrays, to be traced in torchax's environment and `like_torch`.

    It takes (caches, weights, inputs): a list of pairs, what `step_weights` names, and the fields of StepInputs. It
    returns (logits [S, V] float32, the new caches).
    """
    from torchax import interop

    step = _Step(model)

    def program(caches: Caches, weights: dict[str, torch.Tensor], inputs: tuple) -> Any:
        named = {f"model.{name}": weight for name, weight in weights.items()}
        return torch.func.functional_call(step, named, (StepInputs(*inputs), caches)).float(), caches

    return interop.jax_view(program)


class TorchaxRunner:
    """torchax.interop's jax.jit."""

    def __init__(self, loaded: LoadedModel, limits: Limits) -> None:
        import jax
        import torchax
        from torchax import interop

        self.device = f"jax on {jax.devices()[0]}"
        self._env = torchax.default_env()
        with self._env, like_torch():
            self._weights = {name: w.to("jax") for name, w in step_weights(loaded.model).items()}
            self._caches = new_caches(loaded.layers, limits, "jax")
        self._program: Any = jax.jit(step_program(loaded.model), donate_argnums=0)
        self._step = interop.torch_view(self._program)

    @torch.no_grad()
    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Run a step. Returns the logits [S, V] on the CPU, float32."""
        with self._env, like_torch():
            on_device = tuple(tensor.to("jax") for tensor in inputs)
            logits, self._caches = self._step(self._caches, self._weights, on_device)
            return torch.from_numpy(np.array(logits.jax()))

    def compiled_programs(self) -> int:
        """How many programs the steps have been compiled to."""
        return self._program._cache_size()
