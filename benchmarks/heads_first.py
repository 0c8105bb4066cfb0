"""A batch as PyTorch's attention takes it: dense tensors [sequences, heads, tokens, D] of sequences that are alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.batch import Batch


def inputs(batch: Batch) -> list[Sequence[tuple[torch.Tensor, ...]]]:
    """(q, k, v) of each set: one of all sequences if they are alike, else one of each."""
    lens = batch.shape.lens
    groups = [(lens[0], len(lens))] if batch.shape.uniform else [(one, 1) for one in lens]

    def split(tokens: torch.Tensor, which: int) -> list[torch.Tensor]:
        parts = tokens.split([one[which] * count for one, count in groups])
        return [
            part.unflatten(0, (count, one[which])).transpose(1, 2).contiguous()
            for part, (one, count) in zip(parts, groups, strict=True)
        ]

    return [
        tuple(zip(split(q, 0), split(k, 1), split(v, 1), strict=True))
        for q, (k, v) in zip(batch.q, batch.dense, strict=True)
    ]


def output(outs: Sequence[torch.Tensor]) -> torch.Tensor:
    """[T, Hq, D] of the results."""
    return torch.cat([out.transpose(1, 2).flatten(0, 1) for out in outs])
