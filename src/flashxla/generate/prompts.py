"""The prompts of a run: from options, a file or standard input; checked before anything heavy is imported."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from flashxla.generate.errors import GenerateError

STANDARD_INPUT = "-"
DEFAULT_PROMPTS = (
    "The with statement is used to",
    "A dictionary",
    "When an exception is raised in the body of a function, Python",
    "Return a list of",
)


def read(args: argparse.Namespace) -> tuple[str, ...]:
    """The prompts that the options name. Raises GenerateError."""
    if args.system is not None and not args.chat:
        raise GenerateError("--system: got it without --chat; accepted: both, or neither")
    if args.prompts_file is None:
        return _checked("--prompt", args.prompt or DEFAULT_PROMPTS, "prompt")
    if args.prompt:
        raise GenerateError("--prompts-file: got it beside --prompt; accepted: one of them")
    prompts = _checked("--prompts-file", _lines(args.prompts_file), "line")
    if not prompts:
        raise GenerateError(
            f"--prompts-file: got {args.prompts_file} without a line; accepted: a prompt on each line"
        )
    return prompts


def _lines(name: str) -> list[str]:
    try:
        if name == STANDARD_INPUT:
            data = sys.stdin.buffer.read()
        else:
            with open(name, "rb") as file:
                data = file.read()
    except OSError as error:
        raise GenerateError(
            f"--prompts-file: got {name}: {error.strerror}; accepted: a text file, or - for standard input"
        ) from error
    # Lone surrogates stand for what is no UTF-8, as in arguments.
    return [line for line in data.decode(errors="surrogateescape").splitlines() if line.strip()]


def _checked(option: str, prompts: Iterable[str], what: str) -> tuple[str, ...]:
    prompts = tuple(prompts)
    for number, prompt in enumerate(prompts, 1):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise GenerateError(
                f"{option}: got {prompt[error.start : error.end]!a} at character {error.start + 1} of {what} "
                f"{number}; accepted: text in UTF-8"
            ) from error
    return prompts
