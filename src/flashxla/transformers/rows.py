"""The sequences of a padded or packed batch, as the operations take them: offsets, lengths and pages."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from flashxla.transformers.masks import reads_values
from flashxla.transformers.once import once


class Paged(NamedTuple):
    """Keys [B, Hk, Sk, D] as pages of one row each: arguments of flash_attn_varlen_func."""

    cu_seqlens_q: torch.Tensor
    seqused_k: torch.Tensor
    leftpad_k: torch.Tensor | None
    block_table: torch.Tensor


class Dense(NamedTuple):
    """Keys [B * Sk, Hk, D]: arguments of flash_attn_varlen_func."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    seqused_k: torch.Tensor | None


class Batch(NamedTuple):
    """The shape of a call: rows, queries and keys of each."""

    rows: int
    queries: int
    keys: int


def paged(batch: Batch, spans: torch.Tensor | None, device: torch.device) -> Paged:
    """spans: int32 [B, 4], see masks.spans."""
    rows = torch.arange(batch.rows, dtype=torch.int32, device=device)
    if spans is None:
        return Paged(
            _offsets(batch.rows, batch.queries, device),
            torch.full_like(rows, batch.keys),
            None,
            rows[:, None],
        )
    return once(spans, ("paged", batch), lambda: _paged(batch, spans, rows))


def dense(batch: Batch, spans: torch.Tensor | None, device: torch.device) -> Dense:
    """spans: int32 [B, 4], see masks.spans."""
    if spans is None:
        offsets_q, offsets_k = (
            _offsets(batch.rows, length, device) for length in (batch.queries, batch.keys)
        )
        return Dense(offsets_q, offsets_k, seqused_k=None)
    return once(spans, ("dense", batch), lambda: _dense(batch, spans))


def _paged(batch: Batch, spans: torch.Tensor, rows: torch.Tensor) -> Paged:
    first_query, end_query, first_key, end_key = spans.unbind(1)
    if batch.queries == 1:
        # One that is no token sees nothing.
        used = torch.where(first_query == end_query, 0, end_key)
        offsets = _offsets(batch.rows, 1, spans.device)
        # A copy: a view of the spans would keep alive what `once` finds it by.
        return Paged(offsets, used.to(torch.int32), first_key.clone(), rows[:, None])
    tables = _between(rows)
    return Paged(_bounds(spans, 0, batch.queries), _between(end_key), _between(first_key), tables[:, None])


def _dense(batch: Batch, spans: torch.Tensor) -> Dense:
    _, _, first_key, end_key = spans.unbind(1)
    return Dense(
        _bounds(spans, 0, batch.queries),
        _bounds(spans, 2, batch.keys),
        seqused_k=_between(end_key - first_key),
    )


def _bounds(spans: torch.Tensor, column: int, length: int) -> torch.Tensor:
    """Offsets int32 [2 * B + 2] of 2 * B + 1 sequences: every other one is a row's tokens, between them is padding."""
    starts = length * torch.arange(spans.shape[0], dtype=torch.int32, device=spans.device)
    bounds = (spans[:, column : column + 2] + starts[:, None]).flatten()
    ends = bounds.new_tensor([0, length * spans.shape[0]])
    return torch.cat([ends[:1], bounds, ends[1:]])


def _between(values: torch.Tensor) -> torch.Tensor:
    """Of the sequences of `_bounds`: a row's value for its tokens, 0 for the padding between."""
    spread = torch.stack([torch.zeros_like(values), values], dim=1).flatten()
    return torch.cat([spread, spread.new_zeros(1)]).to(torch.int32)


def packed(position_ids: torch.Tensor, rows: int, length: int) -> tuple[torch.Tensor, int] | None:
    """Offsets int32 [S + 1] of sequences packed in rows, and the longest; None if each row is one.

    A sequence begins where a position is not larger than the one before it. Positions may be left out.
    """
    if position_ids.dim() != 2 or position_ids.shape[0] not in (1, rows) or position_ids.shape[1] != length:
        return None
    return once(position_ids, ("packed", rows), lambda: _packed(position_ids, rows), of_caller=True)


def _packed(position_ids: torch.Tensor, rows: int) -> tuple[torch.Tensor, int] | None:
    positions = position_ids.expand(rows, -1)
    starts = torch.ones_like(positions, dtype=torch.bool)
    starts[:, 1:] = positions.diff(dim=1) <= 0
    total = positions.numel()
    if reads_values(position_ids):
        offsets = starts.flatten().nonzero().flatten().tolist()
        if len(offsets) == rows:
            return None
        offsets.append(total)
        longest = max(end - start for start, end in itertools.pairwise(offsets))
        return torch.tensor(offsets, dtype=torch.int32, device=position_ids.device), longest
    # As many sequences as tokens, of which those at the end are empty.
    tokens = torch.arange(total, dtype=torch.int32, device=position_ids.device)
    begins = torch.where(starts.flatten(), tokens, total).sort().values
    return torch.cat([begins, begins.new_full((1,), total)]).to(torch.int32), positions.shape[1]


def together(tokens: torch.Tensor, queries: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For tokens that do not lie together: orders of the queries and of the keys in which they do, and their spans.

    tokens: bool [B, M], which keys are; the last `queries` are the queries. Returns int64 [B, queries], int64 [B, M]
    and int32 [B, 4].
    """
    return once(tokens, ("together", queries), lambda: _together(tokens, queries))


def _together(tokens: torch.Tensor, queries: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    orders, ends = [], []
    for part in (tokens[:, -queries:], tokens):
        orders.append(part.logical_not().int().argsort(dim=1, stable=True))
        ends.append(part.sum(1, dtype=torch.int32))
    zero = torch.zeros_like(ends[0])
    return orders[0], orders[1], torch.stack([zero, ends[0], zero, ends[1]], dim=1)


def seen(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For one query of each row: an order of the keys in which those that it sees come first, and their spans.

    keys: bool [B, M], which are seen. Returns int64 [B, M] and int32 [B, 4].
    """
    return once(keys, "seen", lambda: _seen(keys))


def _seen(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    order = keys.logical_not().int().argsort(dim=1, stable=True)
    end = keys.sum(1, dtype=torch.int32)
    zero, one = torch.zeros_like(end), torch.ones_like(end)
    return order, torch.stack([zero, one, zero, end], dim=1)


def windowed(tokens: torch.Tensor, queries: int, sides: tuple[int, int]) -> Dense:
    """The sequences of a window, in the orders of `together`, for keys [B * M, Hk, D].

    A window is one of places, be they tokens or not, and the operations count the keys that are there. So a sequence
    is a run of queries for which both are the same, and two sequences may have keys in common.

    sides: how many places to the left and to the right a query sees. (w, 0) is for causal attention with that window.
    Otherwise each query is a sequence of its own, which sees all of its keys.
    """
    return once(tokens, ("windowed", queries, sides), lambda: _windowed(tokens, queries, sides))


def _windowed(tokens: torch.Tensor, queries: int, sides: tuple[int, int]) -> Dense:
    left, right = sides
    rows, length = tokens.shape
    order, _, _ = together(tokens, queries)
    places = order + (length - queries)
    # The keys that a query sees, by their numbers among a row's tokens: [first, end).
    before = torch.nn.functional.pad(tokens.cumsum(1, dtype=torch.int32), (1, 0))
    is_token = tokens.gather(1, places)
    first = torch.where(is_token, before.gather(1, (places - left).clamp(min=0)), before[:, -1:])
    end = torch.where(is_token, before.gather(1, (places + right + 1).clamp(max=length)), first)

    begins = torch.ones_like(is_token)
    if right == 0:
        # One that the operation's window serves goes on; so does one that sees what the sequence began with.
        served = first == (end - 1 - left).clamp(min=0)
        begins[:, 1:] = served[:, 1:].logical_not() & (served[:, :-1] | (first.diff(dim=1) != 0))
    # As many sequences as queries, of which those at the end are empty.
    total = rows * queries
    numbers = torch.arange(total, dtype=torch.int32, device=tokens.device)
    starts = torch.where(begins.flatten(), numbers, total).sort().values
    offsets = torch.cat([starts, starts.new_full((1,), total)])
    row_starts = length * torch.arange(rows, dtype=torch.int32, device=tokens.device)[:, None]
    first_keys = torch.cat([(first + row_starts).flatten(), offsets.new_full((1,), rows * length)])[offsets]
    end_keys = (end + row_starts).flatten()[offsets[1:] - 1]
    return Dense(offsets, first_keys, seqused_k=(end_keys - first_keys[:-1]).clamp(min=0))


def _offsets(rows: int, length: int, device: torch.device) -> torch.Tensor:
    return length * torch.arange(rows + 1, dtype=torch.int32, device=device)
