"""Prints a document's tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from flashxla.bench.report import seconds

_WIDTH_OF_FILES = 180
_COLUMNS = ("time", "rate", "of ceiling", "flashxla is faster by", "spread", "error")
# Of steps: shown where a row has them. Title, field, form.
_STEP_COLUMNS = (
    ("tokens/s", "tokens_per_second", ".4g"),
    ("host, us", "host_us", ".0f"),
    ("programs a step", "programs_per_step", ".3g"),
    ("largest gap", "largest_gap", ".1%"),
)

Row = dict[str, Any]


def show(content: Mapping[str, Any], console: Console | None = None) -> None:
    """Print it."""
    console = console or Console()
    if not console.is_terminal:
        console.width = _WIDTH_OF_FILES
    device = content["device"]
    console.print(device.get("name", content["machine"]["cpu"]), markup=False)
    console.print(", ".join(f"{name} {version}" for name, version in content["versions"].items()))
    for ceiling in content["ceilings"].values():
        console.print(
            f"ceiling: {ceiling['name']}: {ceiling['rate']:.4g} {ceiling['unit']} (+- {ceiling['spread']:.1%})",
            markup=False,
        )
    for name, rows in content["results"].items():
        console.print(table(name, rows))
        for row in rows:
            if "failed" in row:
                line = f"{row['case']}: {row['contender']} not measured: {row['failed']}"
                console.print(line, style="dim", markup=False)


def table(name: str, rows: list[Row]) -> Table:
    """Of a section."""
    found = Table(title=name, title_justify="left")
    for column in ("case", "contender"):
        found.add_column(column)
    for column in _COLUMNS:
        found.add_column(column, justify="right")
    shown = [column for column in _STEP_COLUMNS if any(column[1] in row for row in rows)]
    for title, *_ in shown:
        found.add_column(title, justify="right")
    last = None
    for row in rows:
        if "us" not in row:
            continue
        case = row["case"] if row["dtype"] in (None, "bfloat16") else f"{row['case']} ({row['dtype']})"
        if last not in (None, case):
            found.add_section()
        found.add_row(case if case != last else "", row["contender"], *cells(row, shown))
        last = case
    return found


def cells(row: Row, more: Sequence[tuple[str, str, str]] = ()) -> tuple[str, ...]:
    """The figures of a row, in the order of the columns."""

    def cell(field: str, form: str, after: str = "") -> str:
        return format(row[field], form) + after if row.get(field) is not None else ""

    time = seconds(row["us"] * 1e-6) if row["us"] >= 0 else f"{row['us']:.3g} us"
    return (
        time,
        cell("rate", ".3g", f" {row.get('unit', '')}"),
        cell("of_ceiling", ".0%"),
        cell("ours_is_faster", ".2f"),
        cell("spread", ".1%"),
        cell("error", ".1e"),
        *(cell(field, form) for _, field, form in more),
    )
