"""What is made of a tensor that every layer of a forward gets, made once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")
_MADE: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def once(tensor: torch.Tensor, key: Hashable, make: Callable[[], T]) -> T:
    """make(), or what it returned for this tensor and key before. For tensors that nobody changes in place.

    A CUDA graph changes its tensors in place, so while one is recorded each caller makes its own.
    """
    if torch.compiler.is_compiling() or capturing(tensor):
        return make()  # a compiled program finds by itself what it makes twice
    # What is made in inference mode cannot be used for gradients.
    mine = key, torch.is_inference_mode_enabled()
    made: dict[Any, Any] = _MADE.setdefault(tensor, {})
    if mine not in made:
        made[mine] = make()
    return made[mine]


def capturing(tensor: torch.Tensor) -> bool:
    """Whether a CUDA graph is being recorded of what is done with the tensor. Compiled code cannot tell."""
    if torch.compiler.is_compiling():
        return False
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
