"""The errors of this package that are the user's to mend, and how they are worded."""

from __future__ import annotations

import sys
import textwrap

# How PyTorch on a CPU, PyTorch on a GPU and XLA say that memory ran out; only Python has an exception for it.
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "RESOURCE_EXHAUSTED")


class GenerateError(ValueError):
    """Wrong options, prompts or models: the message names what came and what is accepted."""


def describe(error: BaseException) -> str:
    """An exception of another library in one line that is not too long."""
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    return textwrap.shorten(text, 300, placeholder=" ...")


def warn(message: str) -> None:
    """Tell the user of something that may be wrong, where the results are."""
    print(f"flashxla generate: warning: {message}", file=sys.stderr)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the machine or on its GPU."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
    )
