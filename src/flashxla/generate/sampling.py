"""Chooses the next token from logits."""

from __future__ import annotations

import torch

from flashxla.generate.options import SamplingOptions


class Sampler:
    """The choices of one sequence.

    Each sequence has a random stream of its own and takes one number of it a token, so neither its neighbours
    in a batch nor a preemption change what it draws.
    """

    def __init__(self, options: SamplingOptions, index: int) -> None:
        self.options = options
        # Multiplying by an odd constant keeps (seed, index) apart from (seed + 1, index - 1). The generator
        # takes 32 bits of its seed.
        self._generator = torch.Generator().manual_seed((options.seed * 0x9E3779B1 + index) % 2**32)

    def choose(self, logits: torch.Tensor) -> int:
        """The next token, from logits [V] on the CPU."""
        options = self.options
        if options.temperature == 0:
            return int(logits.argmax())
        scores, tokens = (logits.double() / options.temperature).sort(descending=True, stable=True)
        if options.top_k:
            scores = scores[: options.top_k]
        probabilities = scores.softmax(0)
        cumulative = probabilities.cumsum(0)
        # The smallest set whose probability reaches top_p: up to and with the token that crosses it.
        kept = int((cumulative - probabilities < options.top_p).sum())
        draw = torch.rand((), generator=self._generator, dtype=torch.float64) * cumulative[kept - 1]
        position = int(torch.searchsorted(cumulative[:kept], draw, right=True))
        return int(tokens[min(position, kept - 1)])
