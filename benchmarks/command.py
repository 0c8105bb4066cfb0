"""`flashxla bench` on a GPU: from the arguments to tables and files."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

from rich.console import Console

from benchmarks import results, sections, supervisor
from benchmarks.sections import SECTIONS
from benchmarks.settings import Settings
from benchmarks.supervisor import Findings
from flashxla import output_file
from flashxla.bench import cli, report

_COLUMNS: tuple[report.Column, ...] = (
    ("time", lambda row: report.seconds(row["us"] * 1e-6)),
    ("rate", report.figure("rate", ".3g", "unit")),
    ("of ceiling", report.figure("of_ceiling", ".0%")),
    ("flashxla is faster by", report.figure("ours_is_faster", ".2f")),
    ("spread", report.figure("spread", ".1%")),
    ("error", report.figure("error", ".1e")),
    ("tokens/s", report.figure("tokens_per_second", ".4g")),
    ("host, us", report.figure("host_us", ".0f")),
    ("programs a step", report.figure("programs_per_step", ".3g")),
    ("largest gap", report.figure("largest_gap", ".1%")),
)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write. Returns the exit code: 1 if one of our operations was not measured."""
    args.dtype, args.rounds = (args.dtype or ["bfloat16"])[:1], args.rounds or Settings.rounds
    settings = Settings(
        device=args.device,
        dtype=args.dtype[0],
        rounds=args.rounds,
        peers=args.peers,
        quick=args.quick,
        everything=args.all,
        only=args.only,
        profile=args.profile,
    )
    names = list(SECTIONS) if args.name in (None, "all") else [args.name]
    known = [case for name in names for case in sections.cases(name, settings)]
    if not any(args.only in case for case in known):
        print(
            f"flashxla bench: --only: got {args.only!r}; accepted: a part of {'; '.join(known)}",
            file=sys.stderr,
        )
        return 2
    to_stdout = args.json == output_file.STANDARD_OUTPUT

    def content(findings: Findings) -> dict[str, Any]:
        return results.document(findings, dataclasses.asdict(settings), cli.command(args))

    def save(findings: Findings) -> None:
        if args.json and not to_stdout:
            _write_json(content(findings), args.json)

    final = content(supervisor.run(names, settings, save))
    _show(final, Console(stderr=to_stdout))
    if args.json:
        _write_json(final, args.json)
    if args.plot:
        from flashxla.bench import plot

        for path, one in results.files(final, args.plot, ".svg").items():
            plot.draw(one, path)
    rows = [row for rows in final["results"].values() for row in rows]
    return int(any("failed" in row and (row["ours"] or row["contender"] == "all") for row in rows))


def _write_json(content: dict[str, Any], path: str) -> None:
    for file, one in results.files(content, path, ".json").items():
        output_file.write_json(file, one)


def _show(content: dict[str, Any], console: Console) -> None:
    report.begin(content, console)
    for ceiling in content["ceilings"].values():
        line = f"ceiling: {ceiling['name']}: {ceiling['rate']:.4g} {ceiling['unit']} (+- {ceiling['spread']:.1%})"
        console.print(line, markup=False)
    for name, rows in content["results"].items():
        timed = [row for row in rows if "us" in row]
        console.print(report.table(name, timed, ("case", "dtype"), _COLUMNS))
        for row in rows:
            if "failed" in row:
                line = f"{row['case']}: {row['contender']} not measured: {row['failed']}"
                console.print(line, style="dim", markup=False)
