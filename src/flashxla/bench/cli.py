"""`flashxla bench`: the command line."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from flashxla import install, output_file

BACKWARD, STRATEGIES, GROWTH = "backward", "strategies", "growth"
TOPICS = ("prefill", "decode", "kv_write", BACKWARD)
VLLM = "vllm"
# Measured by the package itself on a GPU, too, and by their names alone there.
BY_NAME = (BACKWARD, GROWTH)
# Measured by the study of GPUs alone; on the cpu with --quick, to see that they run.
STUDY = ("mixed", "overhead", "plan", "step")
TORCH, JAX = "torch", "jax"
IN_JAX = ("prefill", "decode", "kv_write")
_EVERYTHING = (None, "all")
_DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `flashxla bench`."""
    parser.description = (
        "Measure the operations on this machine, beside what else could do the work. On a GPU a checkout of flashxla "
        "measures more than an installed wheel: its folder benchmarks has the study of NVIDIA GPUs."
    )
    parser.add_argument(
        "name",
        nargs="?",
        choices=(*TOPICS, STRATEGIES, GROWTH, *STUDY, VLLM, "all"),
        help="what to measure; everything that the device has if left out, but growth. backward is gradients; on a GPU "
        "a checkout measures them by this name alone. growth: the time of a call as sequences, tables, contexts or "
        "prompts grow. On the cpu alone: strategies (ways to write a cache from PyTorch/XLA). On GPUs, from a "
        "checkout: mixed batches, overhead in a jitted program, plan (one for all layers, or one each), step (a "
        "decode step of a model shaped as Llama 3 8B). vllm: the engine, where the plugin for vLLM is installed "
        "(docs/vllm.md)",
    )
    parser.add_argument(
        "--peers", action="store_true", help="also time PyTorch's and JAX's own ways, in turn with ours"
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write everything that was measured; - is standard output. On a GPU also a folder, with a file a topic",
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="draw it; the name says the format (.svg, .png). Folders as with --json",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument(
        "--frontend",
        choices=(TORCH, JAX),
        help=f"whose tensors; jax: {', '.join(IN_JAX)}. Default: torch if it is installed",
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=_DTYPES,
        help="default: float32 and bfloat16, on a GPU bfloat16; strategies, growth and the study take the first",
    )
    parser.add_argument("--threads", type=_positive, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--rounds",
        type=_positive,
        metavar="N",
        help="samples of each contender, in turn; default: 7, in the study twice 12",
    )
    parser.add_argument(
        "--all", action="store_true", help="study: more layouts, page sizes, head sizes, masks and types"
    )
    parser.add_argument(
        "--only",
        metavar="TEXT",
        default="",
        help="study: the cases whose names hold this text, such as 'batch 16'",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="study: also the kernels inside the programs of overhead and step",
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny shapes: does everything run? The figures mean nothing"
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def checkout() -> Path | None:
    """The checkout that this package runs from, if any: it has the study of GPUs, in the folder benchmarks."""
    source = Path(__file__).parents[2]
    is_checkout = source.name == "src" and (source.parent / "benchmarks" / "command.py").is_file()
    return source.parent if is_checkout else None


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write the files that were asked for. Returns the exit code."""
    # A parent of the measuring process: neither may take the whole GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # Where TorchTPU is installed, `import torch` would start it, without a plugin.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    if args.name == VLLM:
        return _vllm(args)
    root = checkout()
    args.frontend = args.frontend or _frontend(args.name)
    args.device = args.device or ("cuda" if _sees_cuda(root, args.frontend) else "cpu")
    in_study = root is not None and args.name not in BY_NAME and (args.device == "cuda" or args.name in STUDY)
    in_study &= args.frontend == TORCH
    problem = _problem(args, root) or _unwritable(args, in_study)
    if not problem and args.only and not in_study:
        problem = f"--only: got {args.only!r}; accepted: with the study of GPUs"
    if problem:
        print(f"flashxla bench: {problem}", file=sys.stderr)
        return 2
    if in_study:
        sys.path.insert(0, str(root))
        exit_code: int = importlib.import_module("benchmarks.command").run(args)
        return exit_code
    args.dtype = args.dtype or (["bfloat16"] if args.device == "cuda" else ["float32", "bfloat16"])
    args.rounds = args.rounds or 7
    # XLA's CPU runtimes read it when they start.
    os.environ["NPROC"] = str(args.threads)

    from rich.console import Console

    from flashxla.bench import report
    from flashxla.bench.topic import Options

    options = Options(
        tuple(args.dtype), args.device, args.threads, args.rounds, args.peers, args.quick, args.frontend
    )
    everything: tuple[str, ...] = {JAX: IN_JAX, TORCH: TOPICS}[args.frontend]
    if args.frontend == TORCH and args.device == "cpu":
        everything += (STRATEGIES,)
    names = everything if args.name in _EVERYTHING else [args.name]
    results = {name: _measure(name, options) for name in names}
    content = report.document(results, options, command(args, "threads"))
    report.show(content, Console(stderr=args.json == output_file.STANDARD_OUTPUT))
    if args.json:
        output_file.write_json(args.json, content)
    if args.plot:
        from flashxla.bench import plot

        plot.draw(content, args.plot)
    return 0


def _vllm(args: argparse.Namespace) -> int:
    """The plugin for vLLM measures its engine."""
    args.device = args.device or ("cuda" if _sees_cuda(checkout(), TORCH) else "cpu")
    problem = _unwritable(args, in_study=False)
    if importlib.util.find_spec("flashxla_vllm") is None:
        problem = "vllm needs the plugin for vLLM: make vllm, then .venv-vllm/bin/flashxla (docs/vllm.md)"
    elif args.plot and importlib.util.find_spec("matplotlib") is None:
        problem = "needs matplotlib: pip install matplotlib"
    elif args.device == "cpu" and not args.quick:
        problem = "vllm measures GPUs; with --quick it runs on the cpu, to see that it does"
    if problem:
        print(f"flashxla bench: {problem}", file=sys.stderr)
        return 2
    exit_code: int = importlib.import_module("flashxla_vllm.bench.command").run(args)
    return exit_code


def _unwritable(args: argparse.Namespace, in_study: bool) -> str | None:
    for option, path in (("--json", args.json), ("--plot", args.plot)):
        if in_study and path and os.path.isdir(path):
            continue  # gets a file a topic
        try:
            output_file.check(option, path)
        except output_file.OutputError as error:
            return f"error: {error}"
    return None


def _problem(args: argparse.Namespace, root: Path | None) -> str | None:
    """Why this cannot be measured here, if so."""
    needed = {"rich": "bench"}
    if args.plot:
        needed["matplotlib"] = "bench"
    if args.frontend == TORCH:
        needed["torch"] = "torch"
        if args.device == "cpu" and args.name in (*_EVERYTHING, STRATEGIES):
            needed["torch_xla"] = "torch-xla"
    missing = [module for module in needed if importlib.util.find_spec(module) is None]
    if missing:
        extras = dict.fromkeys(needed[module] for module in missing)
        return f"needs {', '.join(missing)}: {install.command(*extras)}"
    if args.frontend == JAX and args.name not in (*IN_JAX, *_EVERYTHING):
        return f"--frontend jax: got {args.name}; accepted: {', '.join(IN_JAX)}"
    asked = {args.name: args.name in STUDY, "--all": args.all, "--only": args.only, "--profile": args.profile}
    for what, is_asked in asked.items():
        if is_asked and root is None:
            return f"{what} comes with a checkout of the repository, in its folder benchmarks"
    if args.device == "cuda":
        if args.name == STRATEGIES:
            return f"--device cuda: {args.name} runs on the cpu only"
        study = root if args.name not in BY_NAME else None
        if not _sees_cuda(study, args.frontend):
            seeing = "neither PyTorch nor JAX sees a" if study else "PyTorch sees no"
            if args.frontend == JAX:
                seeing = "JAX sees no"
            return f"--device cuda: {seeing} CUDA device"
    elif args.name in STUDY and not args.quick:
        return f"{args.name} measures GPUs; with --quick it runs on the cpu, to see that it does"
    return None


def _frontend(name: str | None) -> str:
    """PyTorch where it is, and for what there is in PyTorch alone."""
    in_jax = name in (*IN_JAX, *_EVERYTHING)
    return JAX if in_jax and importlib.util.find_spec("torch") is None else TORCH


def _sees_cuda(root: Path | None, frontend: str) -> bool:
    """The study makes do with JAX where PyTorch has no CUDA."""
    if frontend == TORCH and importlib.util.find_spec("torch"):
        import torch

        if torch.cuda.is_available():
            return True
    if (root or frontend == JAX) and any(
        importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)
    ):
        import jax

        return jax.default_backend() == "gpu"
    return False


def _measure(name: str, options: Any) -> list[dict[str, Any]]:
    if name == STRATEGIES:
        from flashxla.bench import strategies

        return strategies.run(options)
    if name == GROWTH:
        from flashxla.bench import growth

        return growth.run(options)
    from flashxla.bench import runner

    if options.frontend == JAX:
        from flashxla.bench import jax_topics

        return runner.run(jax_topics.TOPICS[name], options)
    return runner.run(importlib.import_module(f"flashxla.bench.{name}").TOPIC, options)


def command(args: argparse.Namespace, *options: str) -> str:
    """The command that measures the same again. options: more of those that have a value."""
    words = ["flashxla bench", *([args.name] if args.name else [])]
    words += [f"--{flag}" for flag in ("peers", "all", "profile", "quick") if getattr(args, flag)]
    words += [f"--only {args.only!r}"] if getattr(args, "only", "") else []
    words += ["--frontend jax"] if getattr(args, "frontend", None) == JAX else []
    words += [f"--dtype {' '.join(args.dtype)}", f"--device {args.device}"]
    words += [f"--{option} {getattr(args, option)}" for option in (*options, "rounds")]
    return " ".join(words)
