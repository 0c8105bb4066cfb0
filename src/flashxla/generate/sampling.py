"""Chooses the next token from logits."""

from __future__ import annotations

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from flashxla.generate.options import SamplingOptions


class Sampler:
    """One sequence's choices. Its random numbers are its own: neither its neighbours nor a preemption change them."""

    def __init__(self, options: SamplingOptions, index: int) -> None:
        self._warpers = LogitsProcessorList()
        if options.temperature:
            self._warpers.append(TemperatureLogitsWarper(options.temperature))
            if options.top_k:
                self._warpers.append(TopKLogitsWarper(options.top_k))
            if options.top_p < 1:
                self._warpers.append(TopPLogitsWarper(options.top_p))
        # Multiplying by an odd constant keeps (seed, index) apart from (seed + 1, index - 1). The generator
        # takes 32 bits of its seed.
        self._generator = torch.Generator().manual_seed((options.seed * 0x9E3779B1 + index) % 2**32)

    def choose(self, logits: torch.Tensor) -> int:
        """The next token, from logits [V] on the CPU."""
        if not self._warpers:
            return int(logits.argmax())
        return int(torch.multinomial(self.probabilities(logits), 1, generator=self._generator))

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """How likely each token is to be drawn, float64 [V]."""
        # With the largest logit at 0 no temperature makes one overflow.
        scores = logits.double() - logits.max()
        return self._warpers(torch.LongTensor(), scores[None])[0].softmax(-1)
