"""Where TorchTPU's tensors lie: what the programs that it runs get as their inputs."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flashxla.xla import pjrt_adapter


def addresses(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Where tensors are: the inputs of programs that read one element of each."""
    torch.accelerator.synchronize()
    with pjrt_adapter.load().watch_inputs() as seen:
        for tensor in tensors:
            tensor.view(-1)[:1].cpu()
    return [inputs[0] for inputs in seen]
