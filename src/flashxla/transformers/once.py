"""What is made of a tensor that every layer of a forward gets, made once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")
_MADE: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def once(tensor: torch.Tensor, key: Hashable, make: Callable[[], T], first: bool | None = None) -> T:
    """make(), or what it returned for this tensor and key before. For tensors that nobody changes in place.

    A CUDA graph changes its tensors in place, so it must make everything itself: while one is captured, what was made
    before is not used. first: whether the caller is the first of a forward, which then makes it for the others; if that
    is not known, each makes its own.
    """
    capturing = _capturing(tensor)
    if torch.compiler.is_compiling() or (capturing and first is None):
        return make()  # a compiled program finds by itself what it makes twice
    # What is made in inference mode cannot be used for gradients.
    mine = key, torch.is_inference_mode_enabled(), capturing
    made: dict[Any, Any] = _MADE.setdefault(tensor, {})
    if mine not in made or (capturing and first):
        made[mine] = make()
    return made[mine]


def _capturing(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
