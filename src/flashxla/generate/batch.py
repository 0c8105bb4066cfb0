"""Turns a step's chunks into padded tensors of few, fixed shapes."""

from __future__ import annotations

from collections.abc import Sequence as Row
from typing import NamedTuple

import torch

from flashxla.generate.scheduler import Chunk, Limits


class StepInputs(NamedTuple):
    """What one step computes. T tokens (padded), S sequences (padded), M blocks a sequence.

    input_ids, position_ids: int64 [1, T].
    block_tables: int32 [S, M].
    context_lens: int32 [S], keys of each sequence with the new tokens among them.
    query_start_loc: int32 [S + 1].
    num_seqs: int32 [1], how many of the S sequences are real.
    logits_rows: int64 [S], the last token of each sequence.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    query_start_loc: torch.Tensor
    num_seqs: torch.Tensor
    logits_rows: torch.Tensor

    def to(self, device: torch.device | str) -> StepInputs:
        """The same on another device."""
        return StepInputs(*(tensor.to(device) for tensor in self))


def token_buckets(limits: Limits) -> tuple[int, ...]:
    """The padded numbers of tokens: one for steps that only decode, one for all others."""
    return tuple(sorted({limits.max_seqs, limits.max_batch_tokens}))


def build_inputs(chunks: Row[Chunk], limits: Limits) -> StepInputs:
    """The tensors of a step, on the CPU, padded to the smallest bucket that holds it."""
    count = sum(chunk.count for chunk in chunks)
    return _build(chunks, limits, next(bucket for bucket in token_buckets(limits) if bucket >= count))


def padding_inputs(limits: Limits, bucket: int) -> StepInputs:
    """A step of a bucket's shape that computes nothing: it compiles the program, the cache stays."""
    return _build((), limits, bucket)


def one_token() -> StepInputs:
    """A step of one sequence's first token, with a cache of one block."""
    zero = torch.zeros(1, dtype=torch.int32)
    return StepInputs(
        input_ids=zero[None].long(),
        position_ids=zero[None].long(),
        block_tables=zero[None],
        context_lens=zero + 1,
        query_start_loc=torch.arange(2, dtype=torch.int32),
        num_seqs=zero + 1,
        logits_rows=zero.long(),
    )


def _build(chunks: Row[Chunk], limits: Limits, bucket: int) -> StepInputs:
    ids: list[int] = []
    positions: list[int] = []
    context_lens: list[int] = []
    starts = [0]
    tables = torch.zeros((limits.max_seqs, limits.blocks_per_sequence), dtype=torch.int32)
    for row, chunk in enumerate(chunks):
        stop = chunk.start + chunk.count
        blocks = chunk.sequence.blocks
        ids += chunk.sequence.tokens(chunk.start, stop)
        positions += range(chunk.start, stop)
        tables[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        context_lens.append(stop)
        starts.append(len(ids))
    last_rows = [start - 1 for start in starts[1:]]
    return StepInputs(
        input_ids=_padded(ids, bucket, 0, torch.int64)[None],
        position_ids=_padded(positions, bucket, 0, torch.int64)[None],
        block_tables=tables,
        context_lens=_padded(context_lens, limits.max_seqs, 0, torch.int32),
        query_start_loc=_padded(starts, limits.max_seqs + 1, len(ids), torch.int32),
        num_seqs=torch.tensor([len(chunks)], dtype=torch.int32),
        logits_rows=_padded(last_rows, limits.max_seqs, 0, torch.int64),
    )


def _padded(values: list[int], size: int, padding: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values + [padding] * (size - len(values)), dtype=dtype)
