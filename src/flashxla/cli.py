"""The `flashxla` command: doctor, generate, export, bench."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

COMMANDS = {
    "doctor": "what is installed and works, with a live proof that a cache write is in place",
    "generate": "batched text generation with a paged cache, from a Hugging Face checkpoint",
    "export": "a model's step as StableHLO programs with weights, to run without Python",
    "bench": "speed of the operations, as ratios against peers measured in the same run",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    from flashxla import __version__

    parser = argparse.ArgumentParser(
        prog="flashxla", description="Attention and KV-cache ops for LLMs inside XLA."
    )
    parser.add_argument("--version", action="version", version=f"flashxla {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        module = importlib.import_module(f"flashxla.{name}.cli")
        sub = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    raise SystemExit(main())
