"""The work of `flashxla export`, once its dependencies are known to be there."""

from __future__ import annotations

import argparse
import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.utils import logging as transformers_logging

import flashxla
from flashxla import native
from flashxla.export.program import Program, lower_step
from flashxla.generate import DEFAULT_MODEL, model, torchax_runner
from flashxla.generate.batch import token_buckets
from flashxla.generate.checkpoint import Checkpoint
from flashxla.generate.command import make_limits
from flashxla.generate.errors import GenerateError
from flashxla.generate.model import LoadedModel
from flashxla.generate.options import check_model_and_sizes
from flashxla.generate.scheduler import Limits
from flashxla.generate.torchax_runner import step_weights
from flashxla.platforms import CPU, PLATFORMS

MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
# Of the manifest. A program that reads it refuses others.
FORMAT = 1


def run(args: argparse.Namespace) -> int:
    """Load, lower, write. Returns the exit code. Raises GenerateError."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    check_model_and_sizes(args)
    platform = PLATFORMS[args.platform]
    try:
        # What a call needs on the platform is asked of its library.
        native.library(platform.name)
    except ImportError as error:
        raise GenerateError(f"--platform: {str(error).removeprefix('flashxla: ')}") from error
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_writable(args.output, error) from error
    torchax_runner.start()
    loaded = model.load(
        Checkpoint(args.model or DEFAULT_MODEL, _dtype(args), args.trust_remote_code), "torchax"
    )
    limits = make_limits(args, loaded)
    programs = [lower_step(loaded, limits, tokens, platform) for tokens in token_buckets(limits)]
    try:
        offsets = _write_weights(loaded, args.output / WEIGHTS)
        for program in programs:
            (args.output / _file(program)).write_bytes(program.code)
        manifest = _manifest(loaded, limits, programs, offsets, platform.name)
        (args.output / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise _not_writable(args.output, error) from error
    sizes = " and ".join(str(program.tokens) for program in programs)
    print(
        f"{args.output}: programs of {sizes} tokens for {platform.name}, {len(offsets)} weights, {MANIFEST}"
    )
    print(f"their custom calls are in {native.library_path(platform.name)}")
    return 0


def _not_writable(folder: Path, error: OSError) -> GenerateError:
    return GenerateError(f"--output: got {folder}: {error.strerror}; accepted: a folder that can be written")


def _dtype(args: argparse.Namespace) -> torch.dtype | str:
    if args.dtype != "auto":
        return getattr(torch, args.dtype)
    return torch.float32 if args.platform == CPU.name else "auto"


def _file(program: Program) -> str:
    return f"step-{program.tokens}.stablehlo"


def _write_weights(loaded: LoadedModel, path: Path) -> dict[str, int]:
    """Write the weights; returns the place of each in the file, in bytes."""
    save_file({name: w.detach().contiguous() for name, w in step_weights(loaded.model).items()}, path)
    with open(path, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {name: 8 + size + entry["data_offsets"][0] for name, entry in header.items()}


def _manifest(
    loaded: LoadedModel, limits: Limits, programs: list[Program], offsets: dict[str, int], platform: str
) -> dict[str, Any]:
    """What a program that runs the step must know: docs/without-python.md."""
    prefix = _bytes_prefix(loaded)
    return {
        "format": FORMAT,
        "flashxla": flashxla.__version__,
        "model": type(loaded.model).__name__,
        "platform": platform,
        "custom_calls": sorted({target for program in programs for target in program.targets}),
        "weights": WEIGHTS,
        "block_size": limits.block_size,
        "num_blocks": limits.num_blocks,
        "max_seqs": limits.max_seqs,
        "max_length": limits.max_length,
        "vocabulary": programs[0].results[0].shape[-1],
        "eos_tokens": sorted(loaded.eos_tokens),
        # Whether the tokens of a text are its bytes, after these ones; null: the model has another tokenizer.
        "bytes_prefix": prefix,
        "programs": [
            {
                "file": _file(program),
                "tokens": program.tokens,
                "arguments": [
                    argument.describe()
                    | ({"offset": offsets[argument.name]} if argument.kind == "weight" else {})
                    for argument in program.arguments
                ],
                "results": [result.describe() for result in program.results],
            }
            for program in programs
        ],
    }


def _bytes_prefix(loaded: LoadedModel) -> list[int] | None:
    """The tokens in front of a text's bytes, for a tokenizer whose tokens are the bytes; None for all others."""
    # Characters of one to four bytes, and what other tokenizers have as words.
    text = "".join(map(chr, [*range(0x800), 0x1000, 0xFFFD, *range(0x10000, 0x110000, 0x40000)])) + " the the"
    tokens = loaded.tokenizer(text).input_ids
    prefix, rest = tokens[: -len(text.encode())], tokens[-len(text.encode()) :]
    return prefix if rest == list(text.encode()) else None
