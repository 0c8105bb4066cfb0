"""What `flashxla doctor` says of vLLM. The plugin knows how to ask: flashxla does not depend on vLLM or on it."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator

from flashxla.doctor.finding import Finding

PLUGIN = "flashxla_vllm"
_DOCS = "how to install it: docs/vllm.md"


def findings() -> Iterator[Finding]:
    """What the plugin's own doctor finds, or one line where there is no vLLM or no plugin."""
    if importlib.util.find_spec(PLUGIN) is None:
        yield Finding("vllm", None, f"{_missing()}; {_DOCS}")
        return
    doctor = importlib.import_module(f"{PLUGIN}.doctor")
    for row in doctor.findings():
        yield Finding(*row)


def _missing() -> str:
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
    return f"{version}, without flashxla's platform for it: flashxla-vllm is not installed"
