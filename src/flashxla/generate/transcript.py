"""What has been generated so far, and how it went."""

from __future__ import annotations

import dataclasses
import time

import torch
from transformers import PreTrainedTokenizerBase

from flashxla.generate.detokenizer import Detokenizer
from flashxla.generate.engine import Token
from flashxla.generate.verify import Comparison


@dataclasses.dataclass
class Result:
    """One prompt's text and tokens. logits are kept for --verify only."""

    prompt: str
    prompt_tokens: list[int]
    text: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    logits: list[torch.Tensor] = dataclasses.field(default_factory=list)


class Transcript:
    """The results of a run, whose time begins now.

    interrupted: what ended the run early, or None.
    comparisons: what --verify found, or None without it.
    """

    def __init__(self, results: list[Result], tokenizer: PreTrainedTokenizerBase, keep_logits: bool) -> None:
        self.results = results
        self.interrupted: str | None = None
        self.comparisons: list[Comparison] | None = None
        self.tokens = 0
        self.seconds = 0.0
        self._started = time.monotonic()
        self._streams = [Detokenizer(tokenizer, r.prompt_tokens) for r in results]
        self._keep_logits = keep_logits

    def add(self, token: Token) -> str:
        """Record a token. Returns the text that is now certain."""
        result = self.results[token.index]
        text = self._streams[token.index].push(token.token, last=token.finish_reason is not None)
        result.tokens.append(token.token)
        result.text += text
        result.finish_reason = token.finish_reason
        if self._keep_logits:
            result.logits.append(token.logits)
        self.tokens += 1
        self.seconds = time.monotonic() - self._started
        return text

    @property
    def tokens_per_second(self) -> float:
        """The speed of generating."""
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def passed(self) -> bool:
        """Whether --verify found no difference."""
        return all(comparison.mismatch is None for comparison in self.comparisons or ())
