"""What a run leaves behind: texts, tokens and numbers."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from flashxla.generate.batch import token_buckets
from flashxla.generate.engine import Engine
from flashxla.generate.errors import GenerateError
from flashxla.generate.runner import Runner
from flashxla.generate.scheduler import Limits


@dataclasses.dataclass
class Result:
    """One prompt's text and tokens. logits are kept for --verify only."""

    prompt: str
    prompt_tokens: list[int]
    text: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    logits: list[torch.Tensor] = dataclasses.field(default_factory=list)


def make_report(
    args: argparse.Namespace,
    runner: Runner,
    limits: Limits,
    engine: Engine,
    results: list[Result],
    seconds: float,
) -> dict[str, Any]:
    """The report that --json writes."""
    tokens = sum(len(r.tokens) for r in results)
    return {
        "model": str(args.model) if args.model else "default",
        "frontend": args.frontend,
        "device": runner.device,
        "token_buckets": token_buckets(limits),
        "compiled_programs": runner.compiled_programs(),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / max(seconds, 1e-9),
        "steps": engine.steps,
        "preemptions": engine.scheduler.preemptions,
        "prompts": [
            {
                "prompt": r.prompt,
                "text": r.text,
                "prompt_tokens": len(r.prompt_tokens),
                "tokens": r.tokens,
                "finish_reason": r.finish_reason,
            }
            for r in results
        ],
    }


def write_json(destination: str, report: dict[str, Any]) -> None:
    """Write a report to a file, or for "-" to standard output. Raises GenerateError."""
    text = json.dumps(report, indent=2, ensure_ascii=False)
    if destination == "-":
        print(text)
        return
    try:
        Path(destination).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise GenerateError(f"--json: could not write {destination}: {error.strerror}") from error
