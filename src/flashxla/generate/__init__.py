"""Batched text generation with a paged cache: what `flashxla generate` runs, and `Generator` for programs."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashxla.generate.errors import GenerateError
    from flashxla.generate.generator import Generator, Piece
    from flashxla.generate.options import SamplingOptions
    from flashxla.generate.transcript import Result

# The folder of the small model in the package.
DEFAULT_MODEL = Path(__file__).parent / "default_model"

_MODULES = {
    "GenerateError": "errors",
    "Generator": "generator",
    "Piece": "generator",
    "Result": "transcript",
    "SamplingOptions": "options",
}


def __getattr__(name: str) -> Any:
    # Imported when they are asked for: the command line checks its options before it imports PyTorch.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


__all__ = ["DEFAULT_MODEL", "GenerateError", "Generator", "Piece", "Result", "SamplingOptions"]
