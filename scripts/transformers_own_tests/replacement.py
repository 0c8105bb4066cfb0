"""The attention that models get in place of "sdpa"."""

from __future__ import annotations

import functools
from typing import Any

_CHOOSE = "_check_and_adjust_attn_implementation"
_PAGED = "paged|"
# What tests ask for by name. flash-attention's own package is not there, and its place is what ours is for.
_REPLACED = ("sdpa", "flash_attention_2", "flash_attention_3")


def replace(name: str) -> None:
    """Let every model that would get one of `_REPLACED` get this attention."""
    from transformers import PreTrainedModel

    if name == "flashxla":
        import flashxla.transformers

        flashxla.transformers.enable()
    original = getattr(PreTrainedModel, _CHOOSE)

    @functools.wraps(original)
    def choose(self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        requested = replaced(attn_implementation, name)
        chosen = original(self, requested, *args, **kwargs)
        # None becomes transformers' default.
        mine = replaced(chosen, name)
        return chosen if mine == chosen else original(self, mine, *args, **kwargs)

    setattr(PreTrainedModel, _CHOOSE, choose)


def replaced(requested: str | None, name: str) -> str | None:
    """The name of an attention implementation, with `name` in place of one of `_REPLACED`."""
    if requested is None:
        return None
    prefix = _PAGED if requested.startswith(_PAGED) else ""
    return prefix + name if requested.removeprefix(_PAGED) in _REPLACED else requested
