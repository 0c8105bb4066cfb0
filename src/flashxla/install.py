"""What is installed, and what to type for a part of flashxla that is missing."""

from __future__ import annotations

import importlib.metadata


def command(*extras: str) -> str:
    """How to install flashxla with some of its extras. No package index has it yet, a checkout does."""
    return f"pip install '.[{','.join(extras)}]' in a checkout of flashxla"


def version(package: str) -> str | None:
    """The version of a package, None if it is not installed. A module may be there all the same, of another package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
