"""A run's findings as the JSON document holds them: ratios and fractions of the ceilings are computed here."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.supervisor import Findings
from flashxla.bench import report
from flashxla.output_file import STANDARD_OUTPUT

Row = dict[str, Any]


def document(findings: Findings, settings: Mapping[str, Any], command: str) -> dict[str, Any]:
    """Everything."""
    ceilings = combined(findings.ceilings)
    return {
        "schema": 2,
        **report.origin(command),
        "device": findings.facts,
        "settings": dict(settings),
        "ceilings": ceilings,
        "results": {name: judged(rows, ceilings) for name, rows in findings.rows.items() if rows},
    }


def combined(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each ceiling, measured before and after; and how far the measurements are apart."""
    found: dict[str, Any] = {}
    for name in measured[0] if measured else ():
        rates = [one[name]["rate"] for one in measured]
        spread = max(rates) / min(rates) - 1
        found[name] = {**measured[0][name], "rate": statistics.median(rates), "spread": spread}
    return found


def judged(rows: list[Row], ceilings: Mapping[str, Any]) -> list[Row]:
    """Rows with `of_ceiling`, and `ours_is_faster`: how many times our first contender's speed is a row's."""
    rows = copy.deepcopy(rows)
    ours: dict[str, float] = {}
    for row in rows:
        if row.get("ours") and "us" in row:
            ours.setdefault(row["case"], row["us"])
    for row in rows:
        if "rate" in row and row["ceiling"] in ceilings:
            row["of_ceiling"] = row["rate"] / ceilings[row["ceiling"]]["rate"]
        if "us" in row and row["case"] in ours and not row.get("derived"):
            row["ours_is_faster"] = row["us"] / ours[row["case"]]
    return rows


def files(content: Mapping[str, Any], path: str, suffix: str) -> dict[str, Mapping[str, Any]]:
    """What to write where: one file; or in a folder (a path without a suffix) one for each section."""
    folder = Path(path)
    if path == STANDARD_OUTPUT or (folder.suffix and not folder.is_dir()):
        return {path: content}
    folder.mkdir(parents=True, exist_ok=True)
    return {
        str(folder / f"{name}{suffix}"): {**content, "results": {name: rows}}
        for name, rows in content["results"].items()
    }
