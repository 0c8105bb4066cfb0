"""What to type to install a part of flashxla that is missing."""

from __future__ import annotations


def command(*extras: str) -> str:
    """How to install flashxla with some of its extras. No package index has it yet, a checkout does."""
    return f"pip install '.[{','.join(extras)}]' in a checkout of flashxla"
