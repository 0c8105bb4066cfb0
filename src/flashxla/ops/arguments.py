"""Arguments of the public functions that the operations take in another form; every front end uses these."""

from __future__ import annotations

import numbers
from typing import Any

from flashxla.ops.cache_format import ONE_TENSOR_DIMS, PAIR_DIMS
from flashxla.ops.messages import type_error, value_error

# The default of a function that takes one tensor or a pair. With a pair it means "NHD".
DEFAULT_LAYOUT = "interleaved"
_WINDOW = "a pair (left, right) of numbers of keys >= 0, -1 or None: unlimited; or None"


def window_sides(function: str, window_size: Any) -> tuple[Any, Any]:
    """The left and the right side of a window; None is unlimited, of both or of one."""
    if window_size is None:
        return -1, -1
    if not isinstance(window_size, (tuple, list)):
        raise type_error(function, "window_size", f"{window_size!r} ({type(window_size).__name__})", _WINDOW)
    if len(window_size) != 2:
        raise value_error(function, "window_size", repr(window_size), _WINDOW)
    left, right = window_size
    return _side(function, window_size, left), _side(function, window_size, right)


def _side(function: str, window_size: Any, side: Any) -> Any:
    if side is None:
        return -1
    # torch.compile's symbols are no Integral.
    if not isinstance(side, (int, numbers.Integral)) and not hasattr(side, "node"):
        raise type_error(function, "window_size", repr(window_size), _WINDOW)
    if side < -1:
        raise value_error(function, "window_size", repr(window_size), _WINDOW)
    return side


def sides_of_windows(function: str, sliding_window: Any, window_size: Any) -> tuple[Any, Any]:
    """The sides of `window_size`, which a call with `sliding_window` cannot have."""
    if sliding_window is not None and window_size is not None:
        raise value_error(function, "window_size", f"{window_size!r} beside sliding_window", "one of the two")
    return window_sides(function, window_size)


def cache_tensors(function: str, kv_cache: Any, layout: Any) -> tuple[Any, Any, Any]:
    """(first tensor, second tensor or None, layout) of a cache that is one tensor or a pair."""
    if not isinstance(kv_cache, (tuple, list)):
        return kv_cache, None, layout
    if len(kv_cache) != 2:
        raise value_error(
            function, "kv_cache", f"{len(kv_cache)} tensors", "one tensor, or a pair (key_cache, value_cache)"
        )
    key_cache, value_cache = kv_cache
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache is None:
            raise type_error(function, name, "None", "a tensor")
    if layout == DEFAULT_LAYOUT:
        layout = "NHD"
    if isinstance(layout, str) and layout not in PAIR_DIMS:
        accepted = f"{', '.join(map(repr, PAIR_DIMS))} with a pair (key_cache, value_cache)"
        if layout in ONE_TENSOR_DIMS:
            accepted += f"; {layout!r} is for one tensor"
        raise value_error(function, "layout", repr(layout), accepted)
    return key_cache, value_cache, layout
