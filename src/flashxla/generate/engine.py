"""The generation loop: schedule, run, sample, until every sequence is finished."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from flashxla.generate.batch import build_inputs
from flashxla.generate.errors import GenerateError
from flashxla.generate.options import SamplingOptions
from flashxla.generate.runner import Runner
from flashxla.generate.sampling import Sampler
from flashxla.generate.scheduler import Limits, Scheduler
from flashxla.generate.sequence import Sequence


@dataclasses.dataclass(frozen=True)
class Token:
    """A token as it is generated.

    index: the prompt's number.
    finish_reason: None, "stop" (the model ended the text) or "length" (a limit did).
    logits: float32 [V] that it was chosen from.
    """

    index: int
    token: int
    finish_reason: str | None
    logits: torch.Tensor


class Engine:
    """Generates for a batch of prompts."""

    def __init__(self, runner: Runner, limits: Limits, eos_tokens: frozenset[int]) -> None:
        self._runner = runner
        self._limits = limits
        self._eos_tokens = eos_tokens
        self.scheduler = Scheduler(limits)
        self.steps = 0

    def generate(
        self, prompts: list[list[int]], max_new_tokens: int, sampling: SamplingOptions
    ) -> Iterator[Token]:
        """Yield the tokens of all prompts as they come. Raises GenerateError, before anything runs."""
        for index, prompt in enumerate(prompts):
            self.scheduler.add(Sequence(index, prompt, max_new_tokens))
        return self._run([Sampler(sampling, index) for index in range(len(prompts))])

    def _run(self, samplers: list[Sampler]) -> Iterator[Token]:
        while self.scheduler.busy:
            chunks = self.scheduler.schedule()
            logits = self._runner.run(build_inputs(chunks, self._limits))
            self.steps += 1
            for chunk, row in zip(chunks, logits, strict=False):
                if chunk.completes:
                    _check_finite(chunk.sequence, row)
                    yield self._append(chunk.sequence, samplers[chunk.sequence.index].choose(row), row)

    def _append(self, sequence: Sequence, token: int, logits: torch.Tensor) -> Token:
        sequence.output.append(token)
        reason = None
        if token in self._eos_tokens:
            reason = "stop"
        elif len(sequence.output) >= sequence.max_tokens:
            reason = "length"
        if reason:
            self.scheduler.finish(sequence)
        return Token(sequence.index, token, reason, logits)


def _check_finite(sequence: Sequence, logits: torch.Tensor) -> None:
    if not logits.isfinite().all():
        raise GenerateError(
            f"--model: got NaN or infinite logits for token {len(sequence.output) + 1} of prompt "
            f"{sequence.index + 1}; accepted: finite ones (the weights are damaged, or too large for the dtype: "
            "--dtype float32 has the widest range that there is)"
        )
