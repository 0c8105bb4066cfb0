"""Modes of PyTorch that a call may be made in, by name."""

from __future__ import annotations

import contextlib
from typing import Any


def mode_of(name: str, device: str = "cpu") -> Any:
    """A context manager. device: the type of the tensors'."""
    import torch
    from torch.autograd import forward_ad
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **kwargs or {})

    class Function(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **kwargs or {})

    modes = {
        "plain": contextlib.nullcontext,
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
        "dispatch mode": Dispatch,
        "function mode": Function,
        "profiler": torch.profiler.profile,
        "forward AD": forward_ad.dual_level,
        "autocast": lambda: torch.autocast(device, torch.bfloat16),
    }
    return modes[name]()
