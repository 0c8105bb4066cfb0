"""How training went: as JSON, as a plot and as a table."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from default_model.training import Contender, Options
from flashxla.bench import machine

COLOURS = {"flashxla": "#1b6ca8", "eager": "#e07b39", "sdpa": "#6b8e5a"}
SMOOTHED, EVERY = 50, 10  # the plot's points: means of so many steps, one every so many


def content(contenders: Iterable[Contender], options: Options, command: str, date: str) -> dict[str, Any]:
    """Everything that was measured."""
    return {
        "command": command,
        "date": date,
        "machine": machine.facts(),
        "versions": machine.versions(),
        "options": dataclasses.asdict(options),
        "results": {
            "training": [
                {
                    "attention": c.attention,
                    "seconds": sum(c.seconds),
                    "median_step_seconds": statistics.median(c.seconds),
                    "validation": [{"step": step, "loss": loss} for step, loss in c.validation],
                    "losses": [round(loss, 5) for loss in c.losses],
                    "step_seconds": [round(seconds, 4) for seconds in c.seconds],
                }
                for c in contenders
            ]
        },
    }


def smoothed(row: Mapping[str, Any], field: str) -> list[tuple[int, float]]:
    """(step, mean of the SMOOTHED steps before it), one every EVERY steps."""
    values: Sequence[float] = row[field]
    ends = [*range(EVERY, len(values), EVERY), len(values)]
    return [(end, statistics.fmean(values[max(0, end - SMOOTHED) : end])) for end in ends]


def distance(row: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Of two curves of the plot: the largest one."""
    pairs = zip(smoothed(row, "losses"), smoothed(other, "losses"), strict=True)
    return max(abs(a - b) for (_, a), (_, b) in pairs)


def draw(found: Mapping[str, Any], path: str) -> None:
    """Losses over the steps and over time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # draws without a display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    rows = found["results"]["training"]
    # Falling widths: the first ones show behind those that lie on them.
    for row, width in zip(rows, (5, 2, 0.8), strict=False):
        first = row is rows[0]
        style = {"color": COLOURS[row["attention"]], "label": row["attention"], "linewidth": width}
        style |= {"alpha": 0.45} if first else {}
        steps, losses = zip(*smoothed(row, "losses"), strict=True)
        minutes = [sum(row["step_seconds"][:step]) / 60 for step in steps]
        for axis, places in ((by_step, steps), (by_time, minutes)):
            axis.plot(places, losses, **style)
        held_out = {p["step"]: p["loss"] for p in row["validation"]}
        minutes = [sum(row["step_seconds"][:step]) / 60 for step in held_out]
        marker = (
            {"marker": "o", "markersize": 8, "alpha": 0.45} if first else {"marker": "x", "markersize": 5}
        )
        for axis, places in ((by_step, list(held_out)), (by_time, minutes)):
            axis.plot(places, list(held_out.values()), linestyle="", color=style["color"], **marker)
    for axis, name in ((by_step, "steps"), (by_time, "minutes on one CPU thread")):
        axis.set_xlabel(name)
        axis.grid(alpha=0.3)
    by_step.set_ylabel("loss, nats a byte")
    by_step.plot([], [], "ko", markersize=5, label="held-out documents")
    by_step.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def table(found: Mapping[str, Any]) -> str:
    """Of docs/training.md: times and losses, and how far each is from the first."""
    ours, *_ = rows = found["results"]["training"]
    lines = [
        "| attention | a step | all steps | ratio | loss, last 100 steps | held-out documents | curves' distance |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['attention']} | {row['median_step_seconds']:.3f} s | {row['seconds'] / 60:.1f} minutes "
            f"| {row['seconds'] / ours['seconds']:.2f} | {statistics.fmean(row['losses'][-100:]):.3f} "
            f"| {row['validation'][-1]['loss']:.3f} | {'-' if row is ours else f'{distance(row, ours):.3f}'} |"
        )
    return "\n".join(lines)
