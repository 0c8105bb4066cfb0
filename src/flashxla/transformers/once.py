"""What is made of a tensor that every layer of a forward gets, made once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")
_MADE: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def once(tensor: torch.Tensor, key: Hashable, make: Callable[[], T], *, of_caller: bool = False) -> T:
    """make(), or what it returned for this tensor and key since the tensor was last written.

    A CUDA graph changes its tensors in place, so while one is recorded each caller makes its own.

    of_caller: whether the tensor may be written in place. What tensors of inference mode hold has no version, so each
    call makes its own of these.
    """
    if torch.compiler.is_compiling() or capturing(tensor):
        return make()  # a compiled program finds by itself what it makes twice
    if tensor.is_inference():
        if of_caller:
            return make()
        version = 0
    else:
        version = tensor._version
    # What is made in inference mode cannot be used for gradients.
    mine = key, torch.is_inference_mode_enabled()
    # A tensor may be written before each step of a training: only the newest version's is kept.
    if tensor not in _MADE or _MADE[tensor][0] != version:
        _MADE[tensor] = version, {}
    made: dict[Any, Any] = _MADE[tensor][1]
    if mine not in made:
        made[mine] = make()
    return made[mine]


def capturing(tensor: torch.Tensor) -> bool:
    """Whether a CUDA graph is being recorded of what is done with the tensor."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
