"""`flashxla bench`: the command line."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from typing import Any

from flashxla import install, output_file

TOPICS = ("prefill", "decode", "kv_write")
STRATEGIES = "strategies"
GPU_ONLY = ("mixed", "overhead", "step")  # on the cpu with --quick, to see that they run
_EVERYTHING = (None, "all")
_CPU_DTYPES, _CPU_ROUNDS = ["float32", "bfloat16"], 7
_DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `flashxla bench`."""
    parser.description = "Measure the operations on this machine, beside what else could do the work."
    parser.add_argument(
        "name",
        nargs="?",
        choices=(*TOPICS, *GPU_ONLY, STRATEGIES, "all"),
        help="what to measure; all that the device has if left out. strategies is for the cpu; mixed, overhead "
        "(of the operations in a jitted program) and step (of a whole Llama-3-8B) are for GPUs",
    )
    parser.add_argument(
        "--peers", action="store_true", help="also time PyTorch's and JAX's own ways, in turn with ours"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write everything that was measured; on a GPU also a folder"
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="draw it; the file's name says the format (.svg, .png), a folder takes .svg",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=_DTYPES,
        help="default: float32 bfloat16, on a GPU bfloat16; strategies and GPUs take the first",
    )
    parser.add_argument("--threads", type=_positive, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--rounds",
        type=_positive,
        metavar="N",
        help="samples of each, in turn; default: 7, on a GPU twice 12",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="GPU: more layouts, page sizes, head sizes, masks and types of ours",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="GPU: also the kernels inside the programs of overhead and step",
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
    # A parent of the measuring process: neither may take the whole GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    args.device = args.device or _default_device()
    problem = _missing(args) or _unwritable(args)
    if problem:
        print(f"flashxla bench: {problem}", file=sys.stderr)
        return 2
    if args.device == "cuda" or args.name in GPU_ONLY:
        from flashxla.bench.gpu import command

        return command.run(args)
    args.dtype, args.rounds = args.dtype or _CPU_DTYPES, args.rounds or _CPU_ROUNDS
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
    names = [*TOPICS, STRATEGIES] if args.name in _EVERYTHING else [args.name]
    results = {name: _measure(name, options) for name in names}
    content = report.document(results, options, _command(args))
    report.show(content)
    if args.json:
        report.write_json(content, args.json)
    if args.plot:
        from flashxla.bench import plot

        plot.draw(content, args.plot)
    return 0


def _unwritable(args: argparse.Namespace) -> str | None:
    try:
        output_file.check("--json", args.json)
        output_file.check("--plot", args.plot)
    except output_file.OutputError as error:
        return f"error: {error}"
    return None


def _missing(args: argparse.Namespace) -> str | None:
    needed = [("rich", "bench"), ("torch", "torch")]
    if args.plot:
        needed.append(("matplotlib", "bench"))
    if args.device == "cpu" and args.name in (*_EVERYTHING, STRATEGIES):
        needed.append(("torch_xla", "torch-xla"))
    for module, extra in needed:
        if importlib.util.find_spec(module) is None:
            return f"needs {module}: {install.command(extra)}"
    if args.device == "cuda":
        if args.name == STRATEGIES:
            return "--device cuda: strategies runs on the cpu only"
        if _default_device() != "cuda":
            return "--device cuda: neither PyTorch nor JAX sees a CUDA device"
    elif args.name in GPU_ONLY and not args.quick:
        return f"{args.name} measures GPUs; with --quick it runs on the cpu, to see that it does"
    return None


def _default_device() -> str:
    if importlib.util.find_spec("torch"):
        import torch

        if torch.cuda.is_available():
            return "cuda"
    if any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        import jax

        if jax.default_backend() == "gpu":
            return "cuda"
    return "cpu"


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
