"""The command `flashxla export`."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from flashxla import install
from flashxla.generate.cli import add_model_arguments, add_size_arguments
from flashxla.generate.errors import GenerateError
from flashxla.platforms import PLATFORMS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.description = (
        "Write a model's step as StableHLO programs with their weights and a description of their arguments, for "
        "programs that run it through the PJRT C API, without Python (docs/without-python.md)."
    )
    add_model_arguments(parser)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write to")
    parser.add_argument(
        "--platform",
        choices=tuple(PLATFORMS),
        default="cpu",
        help="what the programs run on; it need not be in this machine (default %(default)s)",
    )
    add_size_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit code: 0, or 2 for what cannot be exported."""
    # Where TorchTPU is installed, `import torch` would start it, without a plugin.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    # Programs for GPUs are lowered without one. JAX's GPU client would take the GPU's memory.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        return _import_command().run(args)
    except GenerateError as error:
        print(f"flashxla export: error: {error}", file=sys.stderr)
        return 2


def _import_command() -> ModuleType:
    try:
        from flashxla.export import command
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("flashxla"):
            raise
        if importlib.util.find_spec("torch_xla"):
            raise GenerateError(
                "it needs torchax for the PyTorch of today, and torch_xla 2.9 brings another torchax: use an "
                f"environment without torch_xla; {install.command('generate', 'torchax')}"
            ) from error
        raise GenerateError(
            f"{error.name} is not installed: {install.command('generate', 'torchax')}"
        ) from error
    return command
