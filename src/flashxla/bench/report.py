"""What a benchmark run found: as a JSON document and as tables."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flashxla.bench import machine
from flashxla.bench.topic import Options

Row = dict[str, Any]
Results = Mapping[str, list[Row]]
_MIB = 2**20
_WIDTH_OF_FILES = 150


def document(results: Results, options: Options, command: str) -> dict[str, Any]:
    """Everything, as JSON holds it."""
    return {
        "schema": 1,
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine.facts(),
        "versions": machine.versions(),
        "options": dataclasses.asdict(options),
        "results": dict(results),
    }


def write_json(content: Mapping[str, Any], path: str) -> None:
    """Write a document."""
    Path(path).write_text(json.dumps(content, indent=1) + "\n")


def show(content: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a document's tables."""
    console = console or Console()
    if not console.is_terminal:
        console.width = _WIDTH_OF_FILES
    facts, versions = content["machine"], content["versions"]
    threads = content["options"]["threads"]
    console.print(
        f"{facts['cpu']}, {threads} threads of {facts['cores']} cores; load {facts['load_average']:.1f}"
    )
    console.print(", ".join(f"{name} {version}" for name, version in versions.items()))
    for name, rows in content["results"].items():
        console.print(_strategies_table(rows) if name == "strategies" else _topic_table(name, rows))
        if name == "strategies":
            _print_errors(rows, console)


def _topic_table(name: str, rows: list[Row]) -> Table:
    ceilings = ", ".join(dict.fromkeys(row["ceiling"] for row in rows))
    table = Table(title=f"{name} (ceiling: {ceilings})", title_justify="left")
    for column in ("case", "dtype", "contender"):
        table.add_column(column)
    unit = rows[0]["unit"] if rows else "rate"
    for column in ("time", unit, "ceiling", "of it", "flashxla is faster by"):
        table.add_column(column, justify="right")
    last = None
    for row in rows:
        group = row["case"], row["dtype"]
        if last not in (None, group):
            table.add_section()
        table.add_row(
            *(group if group != last else ("", "")),
            row["contender"],
            seconds(row["seconds"]),
            f"{row['rate']:.3g}",
            f"{row['ceiling_rate']:.3g}",
            f"{row['of_ceiling']:.0%}",
            f"{row['ours_is_faster']:.2f}",
        )
        last = group
    return table


def _strategies_table(rows: list[Row]) -> Table:
    sizes = sorted({row["bytes"] for row in rows if "bytes" in row})
    table = Table(
        title="strategies: one write of 64 tokens on PyTorch/XLA, by the size of the cache",
        title_justify="left",
    )
    for column in ("strategy", "mode", "works"):
        table.add_column(column)
    for size in sizes:
        table.add_column(f"{size // _MIB} MiB", justify="right")
    for column in ("last / first", "extra memory", "same buffer"):
        table.add_column(column, justify="right")
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
        table.add_row(strategy, mode, "yes" if works else "no", *times, *facts)
    return table


def _print_errors(rows: list[Row], console: Console) -> None:
    for row in rows:
        if "error" in row:
            console.print(f"{row['strategy']}, {row['mode']}: {row['error']}", style="dim", markup=False)


def by_line(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    """The rows of strategies, by (strategy, mode)."""
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        lines.setdefault((row["strategy"], row["mode"]), []).append(row)
    return lines


def seconds(value: float) -> str:
    """A time for people."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-6:.3g} us"
