"""Draws a benchmark run: bars of rates or times, and times over what grows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg  # draws without a display
from matplotlib.figure import Figure

from flashxla.bench.report import Row, by_line

_MIB = 2**20
_BAR_INCHES, _MARGIN_INCHES, _LINES_INCHES = 0.2, 1.1, 4.5
_OURS, _PEERS = (
    ("#1b6ca8", "#4a9bd1", "#8cc3e6", "#bcdcf0", "#0f3f66"),
    ("#e07b39", "#f2b441", "#9c9c9c", "#6b8e5a"),
)


def draw(content: Mapping[str, Any], path: str) -> None:
    """Write a document's plot to a file whose name says the format; nothing if nothing was timed."""
    panels = [(name, rows) for name, rows in _panels(content["results"]) if rows]
    if not panels:
        return
    heights = [_bars_inches(rows) if "contender" in rows[0] else _LINES_INCHES for _, rows in panels]
    figure = Figure(figsize=(9, sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axis, (name, rows) in zip(axes, panels, strict=True):
        if "mode" in rows[0]:
            _draw_strategies(axis, rows)
        elif "series" in rows[0]:
            _draw_growth(axis, rows)
        else:
            _draw_bars(axis, rows, content.get("ceilings", {}))
        axis.set_title(name)
    device = content.get("device", {}).get("name") or content["machine"]["cpu"]
    figure.suptitle(device, fontsize="small")
    figure.savefig(path, dpi=120)


def _panels(results: Mapping[str, list[Row]]) -> list[tuple[str, list[Row]]]:
    panels = []
    for name, rows in results.items():
        if name == "strategies":
            for mode in dict.fromkeys(row["mode"] for row in rows):
                panels.append((f"{name}, {mode}", [row for row in rows if row["mode"] == mode]))
        else:
            timed = [row for row in rows if ("seconds" in row or "us" in row) and not row.get("derived")]
            panels.append((name, timed))
    return panels


def _label(row: Row) -> str:
    usual = row["dtype"] is None or ("us" in row and row["dtype"] == "bfloat16")  # on a GPU
    return row["case"] if usual else f"{row['case']}\n{row['dtype']}"


def _bars_inches(rows: list[Row]) -> float:
    return _MARGIN_INCHES + _BAR_INCHES * (len(rows) + len({_label(row) for row in rows}))


def _draw_bars(axis: Axes, rows: list[Row], ceilings: Mapping[str, Any]) -> None:
    """Rates if all rows have one, else microseconds."""
    rated = all("rate" in row for row in rows)
    colours = _colours(rows)
    place, last = 0.0, None
    ticks: dict[str, list[float]] = {}
    for row in rows:
        label = _label(row)
        place += 2 if last not in (None, label) else 1
        last = label
        ticks.setdefault(label, []).append(place)
        value = row["rate"] if rated else row["us"]
        axis.barh(place, value, 0.9, color=colours[row["contender"]])
        axis.annotate(f" {value:.3g}", (value, place), va="center", fontsize="x-small")
    axis.set_yticks([sum(places) / len(places) for places in ticks.values()], list(ticks), fontsize="small")
    axis.set_xlabel(rows[0]["unit"] if rated else "us")
    ceiling = ceilings.get(rows[0].get("ceiling", ""))
    if rated and ceiling:
        axis.axvline(ceiling["rate"], color="black", linestyle="--", linewidth=1, label=ceiling["name"])
    for contender, colour in colours.items():
        axis.barh([0], [0], color=colour, label=contender)
    axis.set_ylim(place + 1, 0)
    axis.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _colours(rows: list[Row]) -> dict[str, str]:
    """Blue is ours."""
    found: dict[str, str] = {}
    for row in rows:
        ours = row.get("ours", row["contender"] == "flashxla")
        palette = _OURS if ours else _PEERS
        used = sum(colour in palette for colour in found.values())
        found.setdefault(row["contender"], palette[used % len(palette)])
    return found


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


def _draw_growth(axis: Axes, rows: list[Row]) -> None:
    """Time over size, a line a series; dashed: what the run's rates allow."""
    for i, series in enumerate(dict.fromkeys(row["series"] for row in rows)):
        cells = [row for row in rows if row["series"] == series]
        sizes = [row["size"] for row in cells]
        axis.loglog(sizes, [row["seconds"] * 1e3 for row in cells], marker="o", color=f"C{i}", label=series)
        axis.loglog(sizes, [row["limit_seconds"] * 1e3 for row in cells], "--", color=f"C{i}", linewidth=1)
    axis.plot([], [], "--", color="black", linewidth=1, label="what the run's rates allow")
    axis.set_xlabel("size")
    axis.set_ylabel("ms a call")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
