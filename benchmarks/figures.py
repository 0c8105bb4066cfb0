"""Figures of the runs behind docs/benchmarks.md, and how they are written."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "benchmarks"

Row = dict[str, Any]


class Run:
    """A JSON file of docs/benchmarks."""

    def __init__(self, name: str) -> None:
        self.content: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
        ((self.section, self.rows),) = self.content["results"].items()

    def where(self, **fields: Any) -> list[Row]:
        """The rows with these fields."""
        return [row for row in self.rows if all(row.get(name) == value for name, value in fields.items())]

    def find(self, **fields: Any) -> Row | None:
        """The only row with these fields, if there is one."""
        rows = self.where(**fields)
        if len(rows) > 1:
            raise LookupError(f"{len(rows)} rows of {self.section} with {fields}")
        return rows[0] if rows else None

    def row(self, **fields: Any) -> Row:
        """The only row with these fields."""
        row = self.find(**fields)
        if row is None:
            raise LookupError(f"no row of {self.section} with {fields}")
        return row

    def all(self, field: str, **fields: Any) -> list[Any]:
        """A field of those rows that have it."""
        return [row[field] for row in self.where(**fields) if field in row]

    def names(self, field: str) -> list[str]:
        """The values of a field, each once."""
        return list(dict.fromkeys(row[field] for row in self.rows))


def is_measured(name: str) -> bool:
    """Whether there is such a file."""
    return (FOLDER / f"{name}.json").is_file()


def number(value: float, digits: int = 3) -> str:
    """Significant digits, and all of those before the point."""
    if abs(value) >= 10**digits:
        return f"{value:.0f}"
    return f"{value:#.{digits}g}".removesuffix(".")


def time(seconds: float) -> str:
    """Seconds, milliseconds or microseconds."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{number(seconds / scale)} {unit}"
    return f"{number(seconds / 1e-6)} us"


def between(values: Iterable[float], form: str = ".2f", scale: float = 1.0) -> str:
    """The smallest and the largest, in words."""
    found = [value / scale for value in values]
    low, high = (format(value, form) for value in (min(found), max(found)))
    return low if low == high else f"{low.removesuffix('%')} to {high}"


def spread(values: Iterable[float]) -> float:
    """How much larger the largest is than the smallest."""
    found = list(values)
    return max(found) / min(found) - 1


def claim(holds: bool, text: str) -> str:
    """A sentence without figures, which the figures must bear out."""
    if not holds:
        raise ValueError(f"the figures no longer say: {text}")
    return text
