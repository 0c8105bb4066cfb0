"""The work of `flashxla generate`, once its dependencies are known to be there."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Iterator

import torch
from transformers.utils import logging as transformers_logging

from flashxla.generate import (
    DEFAULT_MODEL,
    memory,
    model,
    torch_tpu_device,
    torchax_runner,
    verify,
    xla_device,
)
from flashxla.generate.batch import token_buckets
from flashxla.generate.checkpoint import Checkpoint
from flashxla.generate.display import make_display
from flashxla.generate.engine import Engine
from flashxla.generate.errors import GenerateError, describe, warn
from flashxla.generate.interrupts import Interrupts
from flashxla.generate.model import LoadedModel
from flashxla.generate.options import SamplingOptions
from flashxla.generate.report import make_report
from flashxla.generate.runner import LazyRunner, OpenXlaRunner, Runner, TorchRunner, warm_up
from flashxla.generate.scheduler import Limits
from flashxla.generate.torch_tpu_runner import TorchTpuRunner
from flashxla.generate.transcript import Result, Transcript
from flashxla.output_file import STANDARD_OUTPUT, write_json


def run(args: argparse.Namespace, sampling: SamplingOptions, interrupts: Interrupts) -> int:
    """Load, generate, report. Returns the exit code. Raises GenerateError."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    quiet = args.json == STANDARD_OUTPUT
    say = functools.partial(print, flush=True) if not quiet else _nothing

    on_cpu = start_device(args)
    checkpoint = Checkpoint(args.model or DEFAULT_MODEL, dtype_of(args, on_cpu), args.trust_remote_code)
    loaded = model.load(checkpoint, args.frontend)
    interrupts.check()
    limits = make_limits(args, loaded)
    if on_cpu:
        memory.check_cache(limits, loaded.layers)
    results = [
        Result(text, _encode(args, loaded, number, text)) for number, text in enumerate(args.prompts, 1)
    ]
    runner = make_runner(args, loaded, limits)
    eos_tokens = frozenset() if args.ignore_eos else loaded.eos_tokens
    engine = Engine(runner, limits, eos_tokens)
    stream = engine.generate([r.prompt_tokens for r in results], args.max_new_tokens, sampling)

    started = time.monotonic()
    warm_up(runner, limits)
    interrupts.check()
    say(f"{args.frontend} on {runner.device}: {_programs(runner, limits)}, {_seconds(started)} to make ready")

    transcript = Transcript(results, loaded.tokenizer, keep_logits=args.verify)
    try:
        total = args.max_new_tokens * len(results)
        with make_display([r.prompt for r in results], total, quiet) as display:
            for token in stream:
                display.show(token.index, transcript.add(token), token.finish_reason is not None)
                interrupts.check()
        say(
            f"{transcript.tokens} tokens in {transcript.seconds:.2f} s: {transcript.tokens_per_second:.1f} tokens/s; "
            f"{engine.steps} steps, {engine.scheduler.preemptions} preemptions, {_programs(runner, limits)}"
        )
        cut = sum(len(r.tokens) < args.max_new_tokens for r in results if r.finish_reason == "length")
        if cut:
            warn(
                f"--max-new-tokens: got {args.max_new_tokens}; {cut} of {len(results)} texts end earlier, at the "
                f"{limits.max_length} tokens that --max-length, --num-blocks or the model allow with the prompt"
            )
        if args.verify:
            comparisons = []
            for comparison in _verify(checkpoint, results, eos_tokens, runner, interrupts):
                comparisons.append(comparison)
                say(f"verify: {comparison}")
            transcript.comparisons = comparisons
            verdict = "equal to" if transcript.passed else "DIFFERENT from"
            say(f"verify: {verdict} transformers' eager generation")
    except BaseException as error:
        ctrl_c = interrupts.pressed or isinstance(error, KeyboardInterrupt)
        transcript.interrupted = "Ctrl-C" if ctrl_c else describe(error)
        raise
    finally:
        # What came before the end is kept, whatever the end was.
        if args.json is not None:
            write_json(args.json, make_report(args, runner, limits, engine, transcript))
    return 0 if transcript.passed else 1


def _encode(args: argparse.Namespace, loaded: LoadedModel, number: int, prompt: str) -> list[int]:
    if args.chat:
        return model.encode_chat(loaded, number, prompt, args.system)
    return model.encode(loaded, number, prompt)


def make_limits(args: argparse.Namespace, loaded: LoadedModel) -> Limits:
    """The sizes of a run, from the options and the model. Raises GenerateError."""
    cache = args.num_blocks * args.block_size
    longest = min(cache, loaded.max_positions or cache)
    if args.max_length and args.max_length > longest:
        reason = "--num-blocks times --block-size" if longest == cache else "the longest that the model takes"
        raise GenerateError(f"--max-length: got {args.max_length}; accepted: at most {longest}, {reason}")
    return Limits(
        num_blocks=args.num_blocks,
        block_size=args.block_size,
        # A step never holds more than the cache does: larger shapes would only be padding.
        max_batch_tokens=min(args.max_batch_tokens, cache),
        max_seqs=min(args.max_seqs, args.num_blocks),
        max_length=args.max_length or longest,
    )


def start_device(args: argparse.Namespace) -> bool:
    """Make sure of the device before anything is loaded. Returns whether it is a CPU."""
    if args.frontend in ("lazy", "openxla"):
        xla_device.start()
        return xla_device.is_cpu()
    if args.frontend == "torchtpu":
        return torch_tpu_device.is_cpu()
    if args.frontend == "torchax":
        return torchax_runner.start()
    device = "cpu" if args.device is None else args.device
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    accepted = ["cpu", *(["cuda"] if gpus else []), *(f"cuda:{gpu}" for gpu in gpus)]
    if device not in accepted:
        raise GenerateError(
            f"--device: got {device!r}; accepted: {', '.join(accepted)} (PyTorch sees {len(gpus)} GPUs)"
        )
    return device == "cpu"


def dtype_of(args: argparse.Namespace, on_cpu: bool) -> torch.dtype | str:
    """Of weights and cache; "auto" is the checkpoint's."""
    if args.dtype != "auto":
        return getattr(torch, args.dtype)
    # With --verify because in bfloat16 rounding decides between tokens that are nearly as likely.
    return torch.float32 if on_cpu or args.verify else "auto"


def make_runner(args: argparse.Namespace, loaded: LoadedModel, limits: Limits) -> Runner:
    """The front end that was asked for. It takes the model over."""
    if args.frontend == "torch":
        return TorchRunner(loaded, limits, args.device or "cpu")
    if args.frontend == "torchtpu":
        return TorchTpuRunner(loaded, limits)
    if args.frontend == "torchax":
        return torchax_runner.TorchaxRunner(loaded, limits)
    return {"lazy": LazyRunner, "openxla": OpenXlaRunner}[args.frontend](loaded, limits)


def _verify(
    checkpoint: Checkpoint,
    results: list[Result],
    eos_tokens: frozenset[int],
    runner: Runner,
    interrupts: Interrupts,
) -> Iterator[verify.Comparison]:
    reference, _ = checkpoint.load_model("eager", "eager")
    if runner.device.startswith("cuda"):
        reference = model.move(reference, runner.device)
    for index, r in enumerate(results):
        interrupts.check()
        yield verify.compare(reference, index, r.prompt_tokens, r.tokens, r.logits, eos_tokens)


def _programs(runner: Runner, limits: Limits) -> str:
    buckets = token_buckets(limits)
    sizes = " and ".join(map(str, buckets))
    compiled = runner.compiled_programs()
    if compiled is None:
        return f"nothing compiled, {len(buckets)} shapes: {sizes} tokens"
    return f"{compiled} programs: {sizes} tokens"


def _seconds(started: float) -> str:
    return f"{time.monotonic() - started:.1f} s"


def _nothing(*_: object) -> None:
    pass
