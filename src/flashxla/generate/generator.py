"""The paged engine for programs: `from flashxla.generate import Generator`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from flashxla.generate import DEFAULT_MODEL, cli, command, memory, model, torch_tpu_device
from flashxla.generate.checkpoint import Checkpoint
from flashxla.generate.engine import Engine, Token
from flashxla.generate.errors import GenerateError
from flashxla.generate.options import SamplingOptions, check_library, check_model_and_sizes
from flashxla.generate.runner import warm_up
from flashxla.generate.transcript import Result, Transcript

Prompt = str | Sequence[int]
GREEDY = SamplingOptions()
FRONTENDS = ("torch", "lazy", "openxla", "torchtpu", "torchax")


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a token adds to a text.

    index: the prompt's number, from 0. text: what is certain now, perhaps nothing yet. token: its number.
    finish_reason: None, "stop" (the model ended the text) or "length" (a limit did).
    """

    index: int
    text: str
    token: int
    finish_reason: str | None


class Generator:
    """A model of a checkpoint's folder with a paged cache, which generates for batches of prompts.

    Args:
        folder: as save_pretrained writes it; without one the model in the package.
        frontend: "torch", "lazy" or "openxla" (PyTorch/XLA, where PJRT_DEVICE says), "torchtpu" or "torchax".
        device: of the frontend "torch": "cpu" or "cuda".
        dtype: of weights and cache: "auto", "float32", "bfloat16" or "float16".
        block_size, num_blocks: of the cache.
        max_seqs, max_batch_tokens: of a step, which is compiled for these sizes.
        max_length: the longest sequence; None is as long as the model and the cache take.
        trust_remote_code: run Python code of the folder.

    Raises:
        GenerateError: a ValueError that says what came and what is accepted.

    The cache is made and all programs are compiled here.
    """

    def __init__(
        self,
        folder: str | Path = DEFAULT_MODEL,
        *,
        frontend: str = "torch",
        device: str | None = None,
        dtype: str = "auto",
        block_size: int = 16,
        num_blocks: int = 256,
        max_seqs: int = 8,
        max_batch_tokens: int = 256,
        max_length: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        with _in_python():
            _check_choice("frontend", frontend, FRONTENDS)
            _check_choice("dtype", dtype, cli.DTYPES)
            sizes = {
                "block_size": block_size,
                "num_blocks": num_blocks,
                "max_seqs": max_seqs,
                "max_batch_tokens": max_batch_tokens,
                **({} if max_length is None else {"max_length": max_length}),
            }
            for name, value in sizes.items():
                _check_positive(name, value)
            if frontend != "torch" and device is not None:
                raise GenerateError(f"device: got {device!r} with frontend {frontend!r}; accepted: None")
            args = argparse.Namespace(
                model=Path(folder),
                frontend=frontend,
                device=device,
                dtype=dtype,
                verify=False,
                **{"max_length": None, **sizes},
            )
            check_model_and_sizes(args)
            check_library(args)
            if frontend == "torchtpu":
                torch_tpu_device.start()
            on_cpu = command.start_device(args)
            checkpoint = Checkpoint(args.model, command.dtype_of(args, on_cpu), trust_remote_code)
            self._loaded = model.load(checkpoint, frontend)
            self._limits = command.make_limits(args, self._loaded)
            if on_cpu:
                memory.check_cache(self._limits, self._loaded.layers)
            self._runner = command.make_runner(args, self._loaded, self._limits)
            warm_up(self._runner, self._limits)
        self.tokenizer = self._loaded.tokenizer
        self._newest: Transcript | None = None

    def generate(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int = 64,
        sampling: SamplingOptions = GREEDY,
        *,
        ignore_eos: bool = False,
        chat: bool = False,
        system: str | None = None,
    ) -> list[Result]:
        """Texts of a batch of prompts, when all are finished.

        Args:
            prompts: texts, or numbers of tokens.
            max_new_tokens: of each.
            sampling: SamplingOptions(temperature, top_k, top_p, seed); greedy without.
            ignore_eos: go on after the model ends a text.
            chat, system: each text is a user's message in the model's chat template; what the model is told first.

        Returns:
            A Result for each prompt, with prompt, prompt_tokens, text, tokens and finish_reason.

        Raises:
            GenerateError: as the class; also where the model gives NaN or infinite logits.
        """
        transcript, pieces = self._start(prompts, max_new_tokens, sampling, ignore_eos, chat, system)
        for _ in pieces:
            pass
        return transcript.results

    def stream(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int = 64,
        sampling: SamplingOptions = GREEDY,
        *,
        ignore_eos: bool = False,
        chat: bool = False,
        system: str | None = None,
    ) -> Iterator[Piece]:
        """The same, token by token as they come.

        There is one cache: the next call of `stream` or `generate` ends what is not read to its end, which then raises
        a RuntimeError when it is read on.
        """
        return self._start(prompts, max_new_tokens, sampling, ignore_eos, chat, system)[1]

    def _start(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        sampling: SamplingOptions,
        ignore_eos: bool,
        chat: bool,
        system: str | None,
    ) -> tuple[Transcript, Iterator[Piece]]:
        """Check everything, and begin when the first piece is taken."""
        with _in_python():
            if isinstance(prompts, str):
                raise GenerateError("prompts: got one text; accepted: a list of texts or of lists of tokens")
            _check_positive("max_new_tokens", max_new_tokens)
            if system is not None and not chat:
                raise GenerateError("system: got it without chat; accepted: both, or neither")
            results = [self._encode(number, p, chat, system) for number, p in enumerate(prompts, 1)]
            eos_tokens = frozenset[int]() if ignore_eos else self._loaded.eos_tokens
            engine = Engine(self._runner, self._limits, eos_tokens)
            tokens = engine.generate([r.prompt_tokens for r in results], max_new_tokens, sampling)
        transcript = Transcript(results, self.tokenizer, keep_logits=False)
        self._newest = transcript
        return transcript, self._pieces(transcript, tokens)

    def _encode(self, number: int, prompt: Prompt, chat: bool, system: str | None) -> Result:
        if not isinstance(prompt, str):
            return Result("", model.known_tokens(self._loaded, number, list(prompt)))
        if chat:
            return Result(prompt, model.encode_chat(self._loaded, number, prompt, system))
        return Result(prompt, model.encode(self._loaded, number, prompt))

    def _pieces(self, transcript: Transcript, tokens: Iterator[Token]) -> Iterator[Piece]:
        with _in_python():
            while True:
                if transcript is not self._newest:
                    raise RuntimeError(
                        "Generator: got a stream that a newer call has ended; accepted: the newest"
                    )
                token = next(tokens, None)
                if token is None:
                    return
                yield Piece(token.index, transcript.add(token), token.token, token.finish_reason)


@contextlib.contextmanager
def _in_python() -> Iterator[None]:
    """Errors name arguments, not options of the command line."""
    try:
        yield
    except GenerateError as error:
        words = re.sub(r"--([a-z][a-z-]*)", lambda found: found[1].replace("-", "_"), str(error))
        raise GenerateError(words) from error


def _check_choice(name: str, value: str, accepted: Sequence[str]) -> None:
    if value not in accepted:
        raise GenerateError(f"{name}: got {value!r}; accepted: {', '.join(map(repr, accepted))}")


def _check_positive(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise GenerateError(f"{name}: got {value!r}; accepted: a whole number >= 1")
