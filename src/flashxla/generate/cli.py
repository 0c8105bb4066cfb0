"""The command `flashxla generate`."""

from __future__ import annotations

import argparse
import io
import os
import sys
from pathlib import Path
from types import ModuleType

from flashxla import install
from flashxla.generate import options, torch_tpu_device
from flashxla.generate.errors import GenerateError, describe, is_out_of_memory
from flashxla.generate.interrupts import Interrupts
from flashxla.output_file import OutputError

DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.description = (
        "Generate text for a batch of prompts with a paged cache, from a Hugging Face checkpoint in a "
        "folder. Without --model: a small model of the package's own that continues text about Python."
    )
    add_model_arguments(parser)
    parser.add_argument("--prompt", nargs="+", metavar="TEXT", help="prompts (default: a few about Python)")
    parser.add_argument("--prompts-file", metavar="FILE", help="a prompt on each line; - is standard input")
    parser.add_argument(
        "--chat", action="store_true", help="each prompt is a user's message, in the model's chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="with --chat: what the model is told first")
    parser.add_argument(
        "--frontend",
        choices=("lazy", "openxla", "torch", "torchtpu", "torchax"),
        default="lazy",
        help="PyTorch/XLA's lazy tensors, torch.compile with openxla, plain PyTorch, torch.compile with TorchTPU, or "
        "torchax (default %(default)s)",
    )
    parser.add_argument("--device", help="of --frontend torch: cpu or cuda (default cpu)")
    parser.add_argument("--verify", action="store_true", help="compare with transformers' eager generation")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - is standard output")

    text = parser.add_argument_group("text")
    text.add_argument(
        "--max-new-tokens", type=_positive, default=64, metavar="N", help="(default %(default)s)"
    )
    text.add_argument("--ignore-eos", action="store_true", help="go on after the model ends the text")
    text.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (the default)")
    text.add_argument("--top-k", type=int, default=0, metavar="N", help="sample from the N likeliest tokens")
    text.add_argument(
        "--top-p", type=float, default=1.0, metavar="X", help="sample from the likeliest share X"
    )
    text.add_argument("--seed", type=int, default=0, metavar="N", help="of the samples (default %(default)s)")

    add_size_arguments(parser)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare which model, and how to read it."""
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="folder of a checkpoint (default: built in)"
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the Python code that the checkpoint's folder may bring: it can do all that you can",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="of weights and cache; auto: float32 on a CPU, where it is fastest, and with generate --verify, else "
        "the checkpoint's",
    )


def add_size_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the sizes of the cache and of a step."""
    sizes = parser.add_argument_group("sizes (they fix the shapes of the compiled programs)")
    for name, default, meaning in (
        ("--block-size", 16, "tokens in a block of the cache"),
        ("--num-blocks", 256, "blocks of the cache"),
        ("--max-batch-tokens", 256, "tokens of a step at most"),
        ("--max-seqs", 8, "sequences of a step at most"),
    ):
        sizes.add_argument(
            name, type=_positive, default=default, metavar="N", help=f"{meaning} (default %(default)s)"
        )
    sizes.add_argument(
        "--max-length", type=_positive, metavar="N", help="longest sequence (default: the model's)"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit code, as docs/generate.md lists them."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A locale that has no sign for a character of the text is no reason to stop.
        sys.stdout.reconfigure(errors="replace")
    with Interrupts() as interrupts:
        try:
            sampling = options.check(args)
            _start_before_torch(args.frontend)
            return _import_command().run(args, sampling, interrupts)
        except BaseException as error:
            if interrupts.pressed or isinstance(error, KeyboardInterrupt):
                return _end(130, "interrupted")
            if isinstance(error, (GenerateError, OutputError)):
                return _end(2, f"error: {error}")
            if is_out_of_memory(error):
                advice = "smaller --num-blocks, --max-batch-tokens, --max-seqs or --model need less"
                return _end(2, f"error: out of memory: {describe(error)}; {advice}")
            if isinstance(error, BrokenPipeError):
                # Whoever read the output wants no more. Python would write what is left when it exits, and fail.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return 141
            raise


def _start_before_torch(frontend: str) -> None:
    if frontend == "torchtpu":
        torch_tpu_device.start()
    else:
        # Where TorchTPU is installed, `import torch` would start it, without a plugin.
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


def _import_command() -> ModuleType:
    try:
        from flashxla.generate import command
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("flashxla"):
            raise
        raise GenerateError(
            f"{error.name} is not installed: {install.command('generate')}, "
            f"and {install.command('generate', 'torch-xla')} for --frontend lazy and openxla"
        ) from error
    return command


def _end(code: int, message: str) -> int:
    print(f"flashxla generate: {message}", file=sys.stderr)
    return code


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; accepted: a whole number >= 1")
    return value
