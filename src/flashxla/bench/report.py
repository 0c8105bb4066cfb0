"""What a benchmark run found: as a JSON document and as tables."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from flashxla.bench import machine
from flashxla.bench.topic import Options

Row = dict[str, Any]
Results = Mapping[str, list[Row]]
Column = tuple[str, Callable[[Row], str]]
_MIB = 2**20
_WIDTH_OF_FILES = 180


def document(results: Results, options: Options, command: str) -> dict[str, Any]:
    """Everything, as JSON holds it."""
    return {"schema": 1, **origin(command), "options": dataclasses.asdict(options), "results": dict(results)}


def origin(command: str) -> dict[str, Any]:
    """Where figures come from."""
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine.facts(),
        "versions": machine.versions(),
    }


def show(content: Mapping[str, Any], console: Console) -> None:
    """Print a document's tables."""
    facts = content["machine"]
    threads = content["options"]["threads"]
    begin(content, console)
    console.print(f"{threads} threads of {facts['cores']} cores; load {facts['load_average']:.1f}")
    for name, rows in content["results"].items():
        if name == "strategies":
            console.print(_strategies_table(rows))
            for row in rows:
                if "error" in row:
                    line = f"{row['strategy']}, {row['mode']}: {row['error']}"
                    console.print(line, style="dim", markup=False)
            continue
        if name == "growth":
            console.print(
                table(
                    "growth (limit: by this run's copy and matmul)",
                    rows,
                    ("series",),
                    _GROWTH_COLUMNS,
                    "size",
                )
            )
            continue
        ceilings = ", ".join(dict.fromkeys(row["ceiling"] for row in rows))
        console.print(table(f"{name} (ceiling: {ceilings})", rows, ("case", "dtype"), _COLUMNS))


def begin(content: Mapping[str, Any], console: Console) -> None:
    """Print the device and the versions."""
    if not console.is_terminal:
        console.width = _WIDTH_OF_FILES
    device = content.get("device", {}).get("name") or content["machine"]["cpu"]
    console.print(device, markup=False)
    console.print(", ".join(f"{name} {version}" for name, version in content["versions"].items()))


def table(
    title: str,
    rows: Sequence[Row],
    groups: Sequence[str],
    columns: Sequence[Column],
    name: str = "contender",
) -> Table:
    """A line a row, with a field that names it; what a group's rows have in common is written once.

    Columns without a figure are left out.
    """
    found = Table(title=title, title_justify="left")
    shown = [(heading, cell) for heading, cell in columns if any(cell(row) for row in rows)]
    for heading in (*groups, name):
        found.add_column(heading)
    for heading, _ in shown:
        found.add_column(heading, justify="right")
    last = None
    for row in rows:
        group = tuple(row[field] for field in groups)
        if last not in (None, group):
            found.add_section()
        first = group if group != last else ("",) * len(group)
        found.add_row(*first, str(row[name]), *(cell(row) for _, cell in shown))
        last = group
    return found


def figure(field: str, form: str, unit: str | None = None) -> Callable[[Row], str]:
    """A cell: a field of the row, and what another one says of its unit."""

    def cell(row: Row) -> str:
        if row.get(field) is None:
            return ""
        return format(row[field], form) + (f" {row[unit]}" if unit else "")

    return cell


def seconds(value: float) -> str:
    """A time for people."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-6:.3g} us"


# Of the topics prefill, decode and kv_write.
_COLUMNS: tuple[Column, ...] = (
    ("time", lambda row: seconds(row["seconds"])),
    ("rate", figure("rate", ".3g", "unit")),
    ("ceiling", figure("ceiling_rate", ".3g")),
    ("of it", figure("of_ceiling", ".0%")),
    ("flashxla is faster by", figure("ours_is_faster", ".2f")),
)


_GROWTH_COLUMNS: tuple[Column, ...] = (
    ("time", lambda row: seconds(row["seconds"])),
    ("limit", lambda row: seconds(row["limit_seconds"])),
    ("by", lambda row: str(row["limit"])),
    ("of it", lambda row: f"{row['limit_seconds'] / row['seconds']:.0%}"),
)


def _strategies_table(rows: list[Row]) -> Table:
    sizes = sorted({row["bytes"] for row in rows if "bytes" in row})
    title = "strategies: one write of 64 tokens on PyTorch/XLA, by the size of the cache"
    found = Table("strategy", "mode", "works", title=title, title_justify="left")
    for size in sizes:
        found.add_column(f"{size // _MIB} MiB", justify="right")
    for column in ("last / first", "extra memory", "same buffer"):
        found.add_column(column, justify="right")
    for (strategy, mode), cells in by_line(rows).items():
        works = all(row["works"] for row in cells)
        timed = {row["bytes"]: row for row in cells if "seconds" in row}
        times = [seconds(timed[size]["seconds"]) if size in timed else "-" for size in sizes]
        last = timed.get(sizes[-1]) if sizes else None
        facts = ("-", "-", "-")
        if last is not None:
            extra = last["extra_bytes"]
            memory = "?" if extra is None else f"{extra / _MIB:.0f} MiB = {extra / last['bytes']:.2f} caches"
            facts = f"{last['growth']:.2f}", memory, "yes" if last["pointer_stays"] else "no"
        found.add_row(strategy, mode, "yes" if works else "no", *times, *facts)
    return found


def by_line(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    """The rows of strategies, by (strategy, mode)."""
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        lines.setdefault((row["strategy"], row["mode"]), []).append(row)
    return lines
