"""TorchTPU: torch.compile with the tpu backend, one program a shape."""

from __future__ import annotations

import functools

import torch

from flashxla.generate.batch import StepInputs
from flashxla.generate.errors import GenerateError, describe
from flashxla.generate.model import LoadedModel, move, new_caches, run_step
from flashxla.generate.scheduler import Limits
from flashxla.xla import torch_tpu


class TorchTpuRunner:
    """TorchTPU, which has been started (torch_tpu_device)."""

    def __init__(self, loaded: LoadedModel, limits: Limits) -> None:
        from flashxla.xla.torch_tpu_graphs import CountingBackend

        platform = torch_tpu.platform()
        assert platform is not None
        self.device = f"{torch_tpu.DEVICE}:0 ({platform.name})"
        self._model = move(loaded.model, torch_tpu.DEVICE)
        self._caches = new_caches(loaded.layers, limits, torch_tpu.DEVICE)
        self._backend = CountingBackend()
        step = functools.partial(run_step, self._model)
        self._step = torch.compile(step, backend=self._backend, dynamic=False, fullgraph=True)

    @torch.no_grad()
    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Run a step. Returns the logits [S, V] on the CPU, float32."""
        try:
            logits = self._step(inputs.to(torch_tpu.DEVICE), self._caches)
        except torch._dynamo.exc.Unsupported as error:
            raise GenerateError(
                "--frontend: got torchtpu with a model that torch.compile cannot make one program of: "
                f"{describe(error)}; accepted: --frontend torch with this model"
            ) from error
        return logits.cpu().float()

    def compiled_programs(self) -> int:
        """How many programs the steps have been compiled to."""
        return self._backend.graphs
