"""The results as tables and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from flashxla_vllm.bench.model import Work


def add_shares(
    results: dict[str, Any], settings: dict[str, Any], work: Work, ceilings: dict[str, float]
) -> None:
    """Add to each figure of an engine its share of what the run's own ceilings allow."""
    prompt, output = settings["input"], settings["output"]
    context = prompt + output / 2
    for case in results.get("offline", {}).get("cases", ()):
        count = case["requests"]
        floor = work.floor(count * prompt, output - 1, count * context, ceilings)
        case["share of the ceilings"] = floor / case["seconds"]
    for case in results.get("steps", {}).get("cases", ()):
        floor = work.floor(0, 1, case["batch"] * context, ceilings)
        case["share of the ceilings"] = 1e3 * floor / case["ms"]
        if case["device busy ms"] is not None:
            case["device idle"] = max(0.0, 1 - case["device busy ms"] / case["ms"])


def tables(content: dict[str, Any]) -> str:
    """Markdown."""
    ceilings, engines = content["ceilings"], content["engines"]
    parts = [
        f"This run's ceilings: {ceilings['matmul'] / 1e12:.0f} TFLOP/s, {ceilings['copy'] / 1e12:.2f} TB/s",
        _table(
            ("engine", "requests", "output tokens/s", "of the ceilings"),
            (
                (
                    name,
                    case["requests"],
                    f"{case['output tokens/s']:.0f}",
                    _percent(case["share of the ceilings"]),
                )
                for name, engine in engines.items()
                for case in engine.get("offline", {}).get("cases", ())
            ),
        ),
        _table(
            ("engine", "batch", "decode step, ms", "device busy, ms", "device idle", "of the ceilings"),
            (
                (
                    name,
                    case["batch"],
                    f"{case['ms']:.2f}",
                    "-" if case["device busy ms"] is None else f"{case['device busy ms']:.2f}",
                    _percent(case.get("device idle")),
                    _percent(case["share of the ceilings"]),
                )
                for name, engine in engines.items()
                for case in engine["steps"]["cases"]
            ),
        ),
        _table(
            ("engine", "start", "imports, s", "engine to first token, s"),
            (
                (name, start, *(f"{seconds:.1f}" for seconds in engine[part]["startup"].values()))
                for name, engine in engines.items()
                for part, start in (("steps", "nothing compiled"), ("offline", "compiled before"))
                if part in engine
            ),
        ),
        _table(
            ("requests/s", "TTFT p50, ms", "p99", "TPOT p50, ms", "p99", "output tokens/s"),
            (
                (
                    f"{case['requests/s']:.0f}",
                    *(f"{case[f'{p}_{what}_ms']:.1f}" for what in ("ttft", "tpot") for p in ("p50", "p99")),
                    f"{case['output_throughput']:.0f}",
                )
                for engine in engines.values()
                for case in engine.get("serving", ())
            ),
        ),
    ]
    return "\n\n".join(parts)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def plot(content: dict[str, Any], path: str) -> None:
    """Decode steps of the engines, the device's share of them, and what the ceilings allow, as bars."""
    from matplotlib.figure import Figure

    engines = content["engines"]
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axis = figure.subplots()
    for i, (name, engine) in enumerate(engines.items()):
        cases = engine["steps"]["cases"]
        width = 0.8 / len(engines)
        places = [j + (i - (len(engines) - 1) / 2) * width for j in range(len(cases))]
        bars = axis.bar(places, [case["ms"] for case in cases], width, label=name)
        axis.bar_label(bars, [f"{case['ms']:.3g}" for case in cases], fontsize=8)
        floors = [case["ms"] * case["share of the ceilings"] for case in cases]
        axis.hlines(
            floors,
            [x - width / 2 for x in places],
            [x + width / 2 for x in places],
            "black",
            label="_" if i else "this run's ceilings allow",  # a name with _ is not listed
        )
    axis.set_xticks(range(len(cases)), [str(case["batch"]) for case in cases])
    axis.set_xlabel("sequences")
    axis.set_title("decode step, ms", fontsize=10)
    axis.legend(fontsize=8)
    figure.savefig(path)
