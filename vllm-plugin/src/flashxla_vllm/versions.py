"""The versions of the packages whose internals overrides.py replaces."""

from __future__ import annotations

import os
from importlib import metadata

SUPPORTED = {"vllm": "0.33.0", "tpu-inference": "0.32.0", "torchax": "0.0.13"}
ANY_VERSION = "FLASHXLA_VLLM_ANY_VERSION"


def check() -> None:
    """Raise unless the installed packages are those that the overrides were written for."""
    wrong = [
        f"{name} {found or 'is not installed'} (needs {needed})"
        for name, needed in SUPPORTED.items()
        if (found := installed(name)) != needed
    ]
    if wrong and not any_version():
        raise RuntimeError(
            f"flashxla-vllm replaces internals of these packages and knows one version of each: {'; '.join(wrong)}. "
            f"Install its requirements.lock, or set {ANY_VERSION}=1 to try these."
        )


def any_version() -> bool:
    """Whether others are to be tried."""
    return os.environ.get(ANY_VERSION) == "1"


def installed(name: str) -> str | None:
    """A package's version, without its local part."""
    try:
        return metadata.version(name).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None
