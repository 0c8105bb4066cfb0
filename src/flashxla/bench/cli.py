"""`flashxla bench`: the command line."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from typing import Any

TOPICS = ("prefill", "decode", "kv_write")
STRATEGIES = "strategies"
_DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `flashxla bench`."""
    parser.description = "Measure the operations on this machine, beside what else could do the work."
    parser.add_argument(
        "name", nargs="?", choices=(*TOPICS, STRATEGIES), help="what to measure; all if left out"
    )
    parser.add_argument(
        "--peers", action="store_true", help="also time PyTorch's and JAX's own ways, in turn with ours"
    )
    parser.add_argument("--json", metavar="FILE", help="write everything that was measured")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw it; the file's name says the format (.svg, .png)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=_DTYPES,
        default=["float32", "bfloat16"],
        help="default: %(default)s; strategies takes the first",
    )
    parser.add_argument("--threads", type=_positive, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--rounds",
        type=_positive,
        default=7,
        metavar="N",
        help="samples of each, in turn; default: %(default)s",
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny shapes: does everything run? The figures mean nothing"
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write the files that were asked for. Returns the exit code."""
    problem = _missing(args)
    if problem:
        print(f"flashxla bench: {problem}", file=sys.stderr)
        return 2
    # XLA's CPU runtimes read it when they start.
    os.environ["NPROC"] = str(args.threads)

    from flashxla.bench import report
    from flashxla.bench.topic import Options

    options = Options(
        dtypes=tuple(args.dtype),
        device=args.device,
        threads=args.threads,
        rounds=args.rounds,
        peers=args.peers,
        quick=args.quick,
    )
    names = [args.name] if args.name else [*TOPICS, STRATEGIES]
    results = {name: _measure(name, options) for name in names}
    content = report.document(results, options, _command(args))
    report.show(content)
    if args.json:
        report.write_json(content, args.json)
    if args.plot:
        from flashxla.bench import plot

        plot.draw(content, args.plot)
    return 0


def _missing(args: argparse.Namespace) -> str | None:
    needed = [("rich", "bench"), ("torch", "torch")]
    if args.plot:
        needed.append(("matplotlib", "bench"))
    if args.name in (None, STRATEGIES):
        needed.append(("torch_xla", "torch-xla"))
    for module, extra in needed:
        if importlib.util.find_spec(module) is None:
            return f"needs {module}: pip install 'flashxla[{extra}]'"
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            return "--device cuda: PyTorch sees no CUDA device"
        if args.name in (None, STRATEGIES):
            return "--device cuda: strategies runs on the cpu only; name one of " + ", ".join(TOPICS)
    return None


def _measure(name: str, options: Any) -> list[dict[str, Any]]:
    if name == STRATEGIES:
        from flashxla.bench import strategies

        return strategies.run(options)
    from flashxla.bench import runner

    topic = importlib.import_module(f"flashxla.bench.{name}").TOPIC
    return runner.run(topic, options)


def _command(args: argparse.Namespace) -> str:
    """The command that measures the same again."""
    words = ["flashxla bench", *([args.name] if args.name else [])]
    words += [f"--{flag}" for flag in ("peers", "quick") if getattr(args, flag)]
    words += [f"--dtype {' '.join(args.dtype)}", f"--device {args.device}"]
    words += [f"--threads {args.threads}", f"--rounds {args.rounds}"]
    return " ".join(words)
