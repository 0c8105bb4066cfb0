"""The options' values, checked before anything heavy is imported."""

from __future__ import annotations

import argparse
import dataclasses
import os

from flashxla import native, output_file
from flashxla.generate import prompts
from flashxla.generate.errors import GenerateError

# Places in the cache are int32 on the device.
_LARGEST_CACHE = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen. temperature 0 is greedy; top_k 0 and top_p 1 leave all tokens in."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise GenerateError(
                f"--temperature: got {self.temperature}; accepted: 0 (greedy) or a number > 0"
            )
        if self.top_k < 0:
            raise GenerateError(f"--top-k: got {self.top_k}; accepted: 0 (all tokens) or a number of tokens")
        if not 0 < self.top_p <= 1:
            raise GenerateError(f"--top-p: got {self.top_p}; accepted: a number in (0, 1]")


def check(args: argparse.Namespace) -> SamplingOptions:
    """Check all that needs neither PyTorch nor the model; args.prompts are the prompts then.

    Raises GenerateError and OutputError.
    """
    sampling = SamplingOptions(args.temperature, args.top_k, args.top_p, args.seed)
    if args.verify and sampling.temperature != 0:
        raise GenerateError(
            f"--verify: got --temperature {sampling.temperature}; accepted: --temperature 0, since two "
            "samples need not agree"
        )
    if args.frontend != "torch" and args.device is not None:
        raise GenerateError(
            f"--device: got {args.device!r} with --frontend {args.frontend}; accepted: --frontend torch only "
            "(PJRT_DEVICE sets that of PyTorch/XLA and TorchTPU, JAX_PLATFORMS that of torchax)"
        )
    args.prompts = prompts.read(args)
    check_model_and_sizes(args)
    output_file.check("--json", args.json)
    check_library(args)
    return sampling


def check_model_and_sizes(args: argparse.Namespace) -> None:
    """Check the model's folder and the sizes of the cache and of a step. Raises GenerateError."""
    if args.max_batch_tokens < args.max_seqs:
        raise GenerateError(
            f"--max-batch-tokens: got {args.max_batch_tokens}; accepted: at least --max-seqs "
            f"{args.max_seqs}, one token for each sequence"
        )
    if args.num_blocks * args.block_size > _LARGEST_CACHE:
        raise GenerateError(
            f"--num-blocks: got {args.num_blocks} with --block-size {args.block_size}; accepted: a cache of at "
            f"most {_LARGEST_CACHE} tokens"
        )
    # Path.is_file would raise an error for a folder that may not be entered.
    if args.model and not os.path.isfile(args.model / "config.json"):
        raise GenerateError(
            f"--model: got {args.model}; accepted: a folder that holds a checkpoint (config.json)"
        )


def check_library(args: argparse.Namespace) -> None:
    """Look for the library of the device. Raises GenerateError."""
    if args.frontend == "torchax":
        return  # JAX says what its device is once it has started
    device = args.device if args.frontend == "torch" else os.environ.get("PJRT_DEVICE")
    try:
        native.library_path("cuda" if (device or "").lower().startswith("cuda") else "cpu")
    except ImportError as error:
        raise GenerateError(str(error).removeprefix("flashxla: ")) from error
