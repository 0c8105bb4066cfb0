"""The work of `flashxla generate`, once its dependencies are known to be there."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from flashxla.generate import model, verify
from flashxla.generate.batch import token_buckets
from flashxla.generate.detokenizer import Detokenizer
from flashxla.generate.display import make_display
from flashxla.generate.engine import Engine, Token
from flashxla.generate.errors import GenerateError
from flashxla.generate.model import LoadedModel
from flashxla.generate.report import Result, make_report, write_json
from flashxla.generate.runner import FRONTENDS, Runner, TorchRunner, warm_up, xla_is_cpu
from flashxla.generate.sampling import SamplingOptions
from flashxla.generate.scheduler import Limits

DEFAULT_PROMPTS = (
    "The with statement is used to",
    "A dictionary",
    "When an exception is raised in the body of a function, Python",
    "Return a list of",
)


def run(args: argparse.Namespace) -> int:
    """Load, generate, report. Returns the exit code. Raises GenerateError."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    sampling = SamplingOptions(args.temperature, args.top_k, args.top_p, args.seed)
    if args.verify:
        verify.check_options(sampling)
    _check_device(args)
    quiet = args.json == "-"
    say = functools.partial(print, flush=True) if not quiet else _nothing

    folder = args.model or model.DEFAULT_MODEL
    dtype = _dtype(args)
    loaded = model.load(folder, dtype)
    limits = make_limits(args, loaded)
    results = [Result(text, loaded.tokenizer(text).input_ids) for text in args.prompt or DEFAULT_PROMPTS]
    runner = _make_runner(args, loaded, limits)
    eos_tokens = frozenset() if args.ignore_eos else loaded.eos_tokens
    engine = Engine(runner, limits, eos_tokens)
    stream = engine.generate([r.prompt_tokens for r in results], args.max_new_tokens, sampling)

    started = time.monotonic()
    warm_up(runner, limits)
    say(f"{args.frontend} on {runner.device}: {_programs(runner, limits)}, {_seconds(started)} to make ready")

    started = time.monotonic()
    total = args.max_new_tokens * len(results)
    with make_display([r.prompt for r in results], total, quiet) as display:
        streams = [Detokenizer(loaded.tokenizer, r.prompt_tokens) for r in results]
        for token in stream:
            display.show(
                token.index, _record(results, streams, token, args.verify), bool(token.finish_reason)
            )
    seconds = time.monotonic() - started

    report = make_report(args, runner, limits, engine, results, seconds)
    say(
        f"{report['tokens']} tokens in {seconds:.2f} s: {report['tokens_per_second']:.1f} tokens/s; "
        f"{engine.steps} steps, {engine.scheduler.preemptions} preemptions, {_programs(runner, limits)}"
    )
    passed = True
    if args.verify:
        comparisons = _verify(folder, dtype, results, eos_tokens, runner)
        passed = all(c.mismatch is None for c in comparisons)
        report["verify"] = [dataclasses.asdict(c) for c in comparisons]
        for comparison in comparisons:
            say(f"verify: {comparison}")
        say(f"verify: {'equal to' if passed else 'DIFFERENT from'} transformers' eager generation")
    if args.json:
        write_json(args.json, report)
    return 0 if passed else 1


def make_limits(args: argparse.Namespace, loaded: LoadedModel) -> Limits:
    """The sizes of a run, from the options and the model. Raises GenerateError."""
    if args.max_batch_tokens < args.max_seqs:
        raise GenerateError(
            f"--max-batch-tokens: got {args.max_batch_tokens}; accepted: at least --max-seqs "
            f"{args.max_seqs}, one token for each sequence"
        )
    bounds = (args.num_blocks * args.block_size, loaded.max_positions, args.max_length)
    return Limits(
        num_blocks=args.num_blocks,
        block_size=args.block_size,
        max_batch_tokens=args.max_batch_tokens,
        max_seqs=args.max_seqs,
        max_length=min(bound for bound in bounds if bound is not None),
    )


def _check_device(args: argparse.Namespace) -> None:
    device = args.device or "cpu"
    if args.frontend != "torch" and args.device:
        raise GenerateError(
            f"--device: got {device!r} with --frontend {args.frontend}; accepted: --frontend torch only "
            "(PyTorch/XLA's device is set by PJRT_DEVICE)"
        )
    if device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()):
        raise GenerateError(f"--device: got {device!r}; accepted: cpu, or cuda where PyTorch sees a GPU")


def _dtype(args: argparse.Namespace) -> torch.dtype | str:
    if args.dtype != "auto":
        return getattr(torch, args.dtype)
    if args.verify:
        # In bfloat16 rounding decides between tokens that are nearly as likely.
        return torch.float32
    if args.frontend == "torch":
        return "auto" if (args.device or "cpu").startswith("cuda") else torch.float32
    return torch.float32 if xla_is_cpu() else "auto"


def _make_runner(args: argparse.Namespace, loaded: LoadedModel, limits: Limits) -> Runner:
    if args.frontend == "torch":
        return TorchRunner(loaded, limits, args.device or "cpu")
    return FRONTENDS[args.frontend](loaded, limits)


def _record(results: list[Result], streams: list[Detokenizer], token: Token, keep_logits: bool) -> str:
    result = results[token.index]
    text = streams[token.index].push(token.token, last=token.finish_reason is not None)
    result.tokens.append(token.token)
    result.text += text
    result.finish_reason = token.finish_reason
    if keep_logits:
        result.logits.append(token.logits)
    return text


def _verify(
    folder: Path, dtype: torch.dtype | str, results: list[Result], eos_tokens: frozenset[int], runner: Runner
) -> list[verify.Comparison]:
    reference = model.load_weights(folder, dtype, "eager")
    if runner.device.startswith("cuda"):
        reference = model.move(reference, runner.device)
    return [
        verify.compare(reference, index, r.prompt_tokens, r.tokens, r.logits, eos_tokens)
        for index, r in enumerate(results)
    ]


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
