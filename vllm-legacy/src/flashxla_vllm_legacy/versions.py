"""The versions of the packages whose internals this package uses and replaces."""

from __future__ import annotations

import os
from importlib import metadata

SUPPORTED = {"vllm": "0.13.0", "torch": "2.9.0", "torch_xla": "2.9.0"}
ANY_VERSION = "FLASHXLA_VLLM_LEGACY_ANY_VERSION"


def check() -> None:
    """Raise unless the installed packages are those that overrides.py was written for."""
    wrong = [
        f"{name} {found or 'is not installed'} (needs {needed})"
        for name, needed in SUPPORTED.items()
        if (found := _installed(name)) != needed
    ]
    if wrong and os.environ.get(ANY_VERSION) != "1":
        raise RuntimeError(
            f"flashxla-vllm-legacy is for the last vLLM with a runner for PyTorch/XLA: {'; '.join(wrong)}. Install its "
            f"requirements.lock, or set {ANY_VERSION}=1 to try these. For the current vLLM there is flashxla-vllm."
        )


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None
