"""Draws a benchmark run: bars of rates, and the strategies' time over the size of the cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg  # draws without a display
from matplotlib.figure import Figure

from flashxla.bench.report import Row, by_line

_MIB = 2**20
_BAR = 0.8  # of the space between two cases


def draw(content: Mapping[str, Any], path: str) -> None:
    """Write a document's plot to a file whose name says the format."""
    panels = list(_panels(content["results"]))
    figure = Figure(figsize=(8, 4.5 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), squeeze=False)[:, 0]
    for axis, (name, rows) in zip(axes, panels, strict=True):
        if name.startswith("strategies"):
            _draw_strategies(axis, rows)
        else:
            _draw_rates(axis, rows)
        axis.set_title(name)
    figure.suptitle(content["machine"]["cpu"], fontsize="small")
    figure.savefig(path, dpi=120)


def _panels(results: Mapping[str, list[Row]]) -> list[tuple[str, list[Row]]]:
    panels = []
    for name, rows in results.items():
        if name != "strategies":
            panels.append((name, rows))
            continue
        for mode in dict.fromkeys(row["mode"] for row in rows):
            panels.append((f"strategies, {mode}", [row for row in rows if row["mode"] == mode]))
    return panels


def _draw_rates(axis: Axes, rows: list[Row]) -> None:
    groups = list(dict.fromkeys((row["case"], row["dtype"]) for row in rows))
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    height = _BAR / len(contenders)
    for i, contender in enumerate(contenders):
        mine = [row for row in rows if row["contender"] == contender]
        places = [groups.index((row["case"], row["dtype"])) + i * height for row in mine]
        axis.barh(places, [row["rate"] for row in mine], height, label=contender)
    middle = (_BAR - height) / 2
    axis.set_yticks([i + middle for i in range(len(groups))], [f"{case}\n{dtype}" for case, dtype in groups])
    axis.tick_params("y", labelsize="small")
    axis.invert_yaxis()
    axis.set_xlabel(rows[0]["unit"] if rows else "")
    axis.legend(fontsize="small")


def _draw_strategies(axis: Axes, rows: list[Row]) -> None:
    # A strategy that fails in one mode takes its colour all the same, so that the panels agree.
    for i, ((strategy, _), cells) in enumerate(by_line(rows).items()):
        timed = [row for row in cells if "seconds" in row]
        if timed:
            sizes = [row["bytes"] // _MIB for row in timed]
            times = [row["seconds"] * 1e3 for row in timed]
            axis.loglog(sizes, times, marker="o", color=f"C{i}", label=strategy)
            axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.minorticks_off()
    axis.set_xlabel("MiB of cache")
    axis.set_ylabel("ms a write")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
