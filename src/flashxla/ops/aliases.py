"""Other names of arguments: what newer versions of flash-attention call them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from flashxla.ops.messages import in_words_of, is_about, value_error

ALIASES = {"page_table": "block_table", "learnable_sink": "s_aux", "return_lse": "return_softmax_lse"}


def with_aliases(function: Callable[..., Any]) -> Callable[..., Any]:
    """A public function that also takes the other names, if it is flash-attention's. Its errors use the caller's."""
    name = function.__name__
    if not name.startswith("flash_attn"):
        return function
    has = inspect.signature(function).parameters
    aliases = {other: ours for other, ours in ALIASES.items() if ours in has}

    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        used = {ours: other for other, ours in aliases.items() if other in kwargs}
        if not used:
            return function(*args, **kwargs)
        for ours, other in used.items():
            if ours in kwargs:
                raise value_error(name, other, f"it beside {ours}", "one of them: they are the same argument")
            kwargs[ours] = kwargs.pop(other)
        try:
            return function(*args, **kwargs)
        except (TypeError, ValueError) as error:
            if not is_about(error, name):
                raise
            raise in_words_of(error, name, used) from error

    return named
