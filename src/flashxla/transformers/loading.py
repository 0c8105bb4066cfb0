"""The one override of transformers: what it does with a model's attention implementation when that is chosen.

transformers takes every name with "flash" in it for a package or a kernel of the hub to import, and replaces it in
models that list the packages they know. Ours are functions that are there already.
"""

from __future__ import annotations

import functools
from typing import Any

_CHOOSE = "_check_and_adjust_attn_implementation"


def accept(names: tuple[str, ...], model_class: Any) -> None:
    """Let models choose one of these names as it is. Raises ImportError, and models that cannot ValueError."""
    original = getattr(model_class, _CHOOSE, None)
    if original is None:
        import transformers

        raise ImportError(
            f"flashxla.transformers: got transformers {transformers.__version__}; accepted: a 5.x whose models have "
            f"{_CHOOSE}"
        )
    if hasattr(original, "flashxla_names"):
        return

    @functools.wraps(original)
    def choose(self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if attn_implementation not in names:
            return original(self, attn_implementation, *args, **kwargs)
        if not self._can_set_attn_implementation():
            raise ValueError(
                f'attn_implementation: got "{attn_implementation}" for {type(self).__name__}, whose attention does not '
                "go through transformers' attention interface; accepted: models whose attention does"
            )
        return attn_implementation

    choose.flashxla_names = names  # type: ignore[attr-defined]
    setattr(model_class, _CHOOSE, choose)
