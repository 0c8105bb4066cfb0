"""What can be measured: each section is a module with `cases(section, settings)` and `run(section, case, settings)`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from flashxla.bench.gpu.compare import Row
from flashxla.bench.gpu.settings import Settings

_MODULES = {
    "prefill": "attention",
    "decode": "attention",
    "mixed": "attention",
    "kv_write": "kv_write",
    "overhead": "overhead",
    "step": "step",
}
SECTIONS = tuple(_MODULES)


def cases(section: str, settings: Settings) -> list[str]:
    """The names of a section's cases."""
    found: list[str] = _module(section).cases(section, settings)
    return found


def run(section: str, case: str, settings: Settings) -> Iterator[Row]:
    """The rows of a case, and {"begin": what} between them."""
    return _module(section).run(section, case, settings)  # type: ignore[no-any-return]


def _module(section: str):  # type: ignore[no-untyped-def]
    return importlib.import_module(f"flashxla.bench.gpu.{_MODULES[section]}")
