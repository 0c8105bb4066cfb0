"""One line of the report."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """One line of the report; ok is None for what is not installed, which is no fault."""

    topic: str
    ok: bool | None
    text: str
