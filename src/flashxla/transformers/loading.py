"""The overrides of transformers: what it does with a model's attention implementation when that is chosen.

transformers takes every name with "flash" in it for a package or a kernel of the hub to import, and replaces it in
models that list the packages they know. Ours are functions that are there already. For a model whose attention it
cannot choose it writes a warning; we refuse.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

_CHOOSE = "_check_and_adjust_attn_implementation"
# What asks the same of a model's parts, and of a model that is there already.
_CHOOSE_PART = "get_correct_attn_implementation"
_SET = "set_attn_implementation"


def accept(names: tuple[str, ...], model_class: Any) -> None:
    """Let models choose one of these names as it is. Raises ImportError, and models that cannot ValueError."""
    original, part, set_ = (getattr(model_class, name, None) for name in (_CHOOSE, _CHOOSE_PART, _SET))
    if original is None or part is None or set_ is None:
        import transformers

        raise ImportError(
            f"flashxla.transformers: got transformers {transformers.__version__}; accepted: a 5.x whose models have "
            f"{_CHOOSE}, {_CHOOSE_PART} and {_SET}"
        )
    if hasattr(original, "flashxla_names"):
        return

    @functools.wraps(original)
    def choose(self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if attn_implementation not in names:
            return original(self, attn_implementation, *args, **kwargs)
        _check(self, attn_implementation)
        return attn_implementation

    @functools.wraps(part)
    def choose_part(self: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> Any:
        if requested_attention in names:
            _check(self, requested_attention)
        return part(self, requested_attention, *args, **kwargs)

    @functools.wraps(set_)
    def set_implementation(self: Any, attn_implementation: str | dict, *args: Any, **kwargs: Any) -> Any:
        name = attn_implementation.get("") if isinstance(attn_implementation, dict) else attn_implementation
        if name in names:
            _check(self, name)
        return set_(self, attn_implementation, *args, **kwargs)

    choose.flashxla_names = names  # type: ignore[attr-defined]
    for name, function in ((_CHOOSE, choose), (_CHOOSE_PART, choose_part), (_SET, set_implementation)):
        setattr(model_class, name, function)


def _check(model: Any, name: str) -> None:
    """Raises ValueError for a model that cannot have this attention."""
    if not model._can_set_attn_implementation():
        raise ValueError(
            f'attn_implementation: got "{name}" for {type(model).__name__}, whose attention does not go through '
            "transformers' attention interface; accepted: models whose attention does"
        )
    # A model without attention of its own says nothing of its parts'. Each part is asked itself.
    has_attention = hasattr(sys.modules.get(type(model).__module__), "ALL_ATTENTION_FUNCTIONS")
    if has_attention and not model._supports_sdpa and not model._supports_flash_attn:
        raise ValueError(
            f'attn_implementation: got "{name}" for {type(model).__name__}, which supports neither "sdpa" nor flash '
            'attention; accepted: models that support one of them, and "eager" for this one'
        )
