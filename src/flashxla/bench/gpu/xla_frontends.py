"""PyTorch/XLA's two ways to run a step: what makes a function of tensors a program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

LAZY, OPENXLA = "flashxla in PyTorch/XLA, lazy", "flashxla in PyTorch/XLA, openxla"

Step = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Frontend:
    """ready: makes a step that returns when its program has been handed to the device."""

    name: str
    ready: Callable[[Step], Step]


def _lazy(step: Step) -> Step:
    """Traced each time; its program is compiled once."""
    import torch_xla

    def run(*args: Any) -> Any:
        result = step(*args)
        torch_xla.sync()
        return result

    return run


def _openxla(step: Step) -> Step:
    """Traced once."""
    import torch

    return torch.compile(step, backend="openxla", dynamic=False, fullgraph=True)


FRONTENDS = {frontend.name: frontend for frontend in (Frontend(LAZY, _lazy), Frontend(OPENXLA, _openxla))}
