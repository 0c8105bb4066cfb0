"""Holds what was generated against transformers' own eager generation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One prompt's result beside the reference.

    tokens: how many were compared. After a first difference the two go on from different texts, so nothing
        that follows can be compared.
    largest_difference: of any logit at any compared position.
    mismatch: where and how the tokens differ, or None.
    """

    index: int
    tokens: int
    largest_difference: float
    mismatch: str | None

    def __str__(self) -> str:
        difference = f"largest logit difference {self.largest_difference:.3g}"
        if self.mismatch:
            return f"prompt {self.index + 1}: {self.mismatch}; {difference}"
        return f"prompt {self.index + 1}: all {self.tokens} tokens equal; {difference}"


@torch.no_grad()
def compare(
    reference: PreTrainedModel,
    index: int,
    prompt: list[int],
    tokens: list[int],
    logits: list[torch.Tensor],
    eos_tokens: frozenset[int],
) -> Comparison:
    """Generate as many tokens with `reference` (greedy, its own cache) and compare token by token."""
    ids = torch.tensor([prompt], device=reference.device)
    config = GenerationConfig(
        max_new_tokens=len(tokens),
        do_sample=False,
        eos_token_id=sorted(eos_tokens) or None,
        # Only there so that transformers does not warn: a batch of one is not padded.
        pad_token_id=0,
    )
    # A checkpoint's own settings (a repetition penalty, say) would fill what the config leaves open.
    reference.generation_config = config
    # The class's: a checkpoint that is trusted may have put a function of its own in its place.
    reference_type: Any = type(reference)
    expected = reference_type.generate(
        reference,
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=config,
        return_dict_in_generate=True,
        output_logits=True,
    )
    expected_tokens = expected.sequences[0, len(prompt) :].tolist()
    largest = 0.0
    pairs = zip(tokens, expected_tokens, strict=False)
    for position, (token, expected_token) in enumerate(pairs):
        row = expected.logits[position][0].float().cpu()
        difference = (logits[position] - row).abs().max().item()
        if not math.isfinite(difference):
            mismatch = f"token {position + 1}: the reference has NaN or infinite logits"
            return Comparison(index, position + 1, difference, mismatch)
        largest = max(largest, difference)
        if token != expected_token:
            gap = (row[expected_token] - row[token]).item()
            mismatch = (
                f"token {position + 1} of {len(tokens)} is {token}, the reference has {expected_token} "
                f"(its logits there differ by {gap:.3g})"
            )
            return Comparison(index, position + 1, largest, mismatch)
    ended = None
    if len(expected_tokens) != len(tokens):
        ended = f"got {len(tokens)} tokens, the reference has {len(expected_tokens)}"
    return Comparison(index, len(expected_tokens), largest, ended)
