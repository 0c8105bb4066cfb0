"""Draws a document: bars of each case's contenders, and the ceiling."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg  # draws without a display
from matplotlib.figure import Figure

from flashxla.bench.gpu import document

_BAR_INCHES = 0.2
_MARGIN_INCHES = 1.1
_OURS, _PEERS = (
    ("#1b6ca8", "#4a9bd1", "#8cc3e6", "#bcdcf0", "#0f3f66"),
    ("#e07b39", "#f2b441", "#9c9c9c", "#6b8e5a"),
)

Row = dict[str, Any]


def draw(content: Mapping[str, Any], path: str, suffix: str = ".svg") -> None:
    """Write a file whose name says the format; or in a folder one for each section."""
    if document.is_folder(path):
        Path(path).mkdir(parents=True, exist_ok=True)
        for name, one in document.by_section(content).items():
            draw(one, str(Path(path) / f"{name}{suffix}"))
        return
    panels = [(name, timed(rows)) for name, rows in content["results"].items()]
    panels = [(name, rows) for name, rows in panels if rows]
    if not panels:
        return
    heights = [_MARGIN_INCHES + _BAR_INCHES * _lines(rows) for _, rows in panels]
    figure = Figure(figsize=(9, sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axis, (name, rows) in zip(axes, panels, strict=True):
        _draw_section(axis, name, rows, content["ceilings"])
    figure.suptitle(content["device"].get("name", content["machine"]["cpu"]), fontsize="small")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def timed(rows: list[Row]) -> list[Row]:
    """The rows that a bar can show."""
    return [row for row in rows if "us" in row and not row.get("derived")]


def _lines(rows: list[Row]) -> int:
    return len(rows) + len({row["case"] for row in rows})


def _draw_section(axis: Axes, name: str, rows: list[Row], ceilings: Mapping[str, Any]) -> None:
    rated = all("rate" in row for row in rows)
    colours = _colours(rows)
    place, last = 0.0, None
    ticks: dict[str, list[float]] = {}
    for row in rows:
        place += 2 if last not in (None, row["case"]) else 1
        last = row["case"]
        ticks.setdefault(row["case"], []).append(place)
        value = row["rate"] if rated else row["us"]
        axis.barh(place, value, 0.9, color=colours[row["contender"]])
        axis.annotate(f" {value:.3g}", (value, place), va="center", fontsize="x-small")
    axis.set_yticks([sum(places) / len(places) for places in ticks.values()], list(ticks), fontsize="small")
    axis.invert_yaxis()
    axis.set_xlabel(rows[0]["unit"] if rated else "us")
    ceiling = ceilings.get(rows[0].get("ceiling", ""))
    if rated and ceiling:
        axis.axvline(ceiling["rate"], color="black", linestyle="--", linewidth=1, label=ceiling["name"])
    for contender, colour in colours.items():
        axis.barh([0], [0], color=colour, label=contender)
    axis.set_ylim(place + 1, 0)
    axis.set_title(name)
    axis.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _colours(rows: list[Row]) -> dict[str, str]:
    """Blue is ours."""
    found: dict[str, str] = {}
    for mine, palette in ((True, _OURS), (False, _PEERS)):
        names = list(dict.fromkeys(row["contender"] for row in rows if bool(row["ours"]) == mine))
        found.update({name: palette[i % len(palette)] for i, name in enumerate(names)})
    return found
