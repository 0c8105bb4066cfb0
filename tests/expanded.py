"""Arrays of which several entries are one in memory, as PyTorch's expanded tensors have them."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def expanded(keys: Array) -> Array:
    """Keys or values [.., H, D] of which all heads are the first one, which is in memory once."""
    return np.broadcast_to(keys[..., :1, :], keys.shape)


def is_expanded(array: Array) -> tuple[bool, ...]:
    """Which axes have one entry in memory for all of theirs."""
    return tuple(
        stride == 0 and length > 1 and array.size > 0
        for stride, length in zip(array.strides, array.shape, strict=True)
    )


def stored(array: Array) -> Array:
    """What is in memory: one entry of each such axis."""
    return array[tuple(slice(1) if once else slice(None) for once in is_expanded(array))]
