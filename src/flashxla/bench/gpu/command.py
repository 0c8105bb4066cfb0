"""`flashxla bench` on a GPU: from the arguments to tables and files."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from flashxla.bench.gpu import document, report, supervisor
from flashxla.bench.gpu.sections import SECTIONS
from flashxla.bench.gpu.settings import Settings
from flashxla.bench.gpu.supervisor import Findings


def run(args: argparse.Namespace) -> int:
    """Measure, print, write. Returns the exit code: 1 if one of our operations was not measured."""
    settings = Settings(
        device=args.device,
        dtype=(args.dtype or ["bfloat16"])[0],
        rounds=args.rounds or Settings.rounds,
        peers=args.peers,
        quick=args.quick,
        everything=args.all,
        profile=args.profile,
    )
    names = list(SECTIONS) if args.name in (None, "all") else [args.name]
    command = _command(args, settings)

    def content(findings: Findings) -> dict[str, Any]:
        return document.build(findings, dataclasses.asdict(settings), command)

    def save(findings: Findings) -> None:
        if args.json:
            document.write(content(findings), args.json)

    final = content(supervisor.run(names, settings, save))
    report.show(final)
    if args.plot:
        from flashxla.bench.gpu import plot

        plot.draw(final, args.plot)
    rows = [row for rows in final["results"].values() for row in rows]
    return int(any("failed" in row and (row["ours"] or row["contender"] == "all") for row in rows))


def _command(args: argparse.Namespace, settings: Settings) -> str:
    words = ["flashxla bench", args.name or "all", f"--device {settings.device}"]
    words += [f"--{flag}" for flag in ("peers", "all", "profile", "quick") if getattr(args, flag)]
    words += [f"--dtype {settings.dtype}", f"--rounds {settings.rounds}"]
    return " ".join(words)
