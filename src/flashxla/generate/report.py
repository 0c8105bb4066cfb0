"""What --json writes."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from flashxla.generate.batch import token_buckets
from flashxla.generate.engine import Engine
from flashxla.generate.runner import Runner
from flashxla.generate.scheduler import Limits
from flashxla.generate.transcript import Transcript


def make_report(
    args: argparse.Namespace, runner: Runner, limits: Limits, engine: Engine, transcript: Transcript
) -> dict[str, Any]:
    """A run's texts, tokens and numbers."""
    report = {
        "model": str(args.model) if args.model else "default",
        "frontend": args.frontend,
        "device": runner.device,
        "token_buckets": token_buckets(limits),
        "compiled_programs": runner.compiled_programs(),
        "interrupted": transcript.interrupted,
        "tokens": transcript.tokens,
        "seconds": transcript.seconds,
        "tokens_per_second": transcript.tokens_per_second,
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
            for r in transcript.results
        ],
    }
    if transcript.comparisons is not None:
        report["verify"] = [dataclasses.asdict(comparison) for comparison in transcript.comparisons]
    return report
