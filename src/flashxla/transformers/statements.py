"""What our mask function says to our attention function: a tensor whose shape has the part that is no numbers.

transformers hands on masks with four dimensions as they are. An attribute would be lost where a program is compiled; a
shape is known there. The shapes are [rows, kind, mark, length]:

    kind: CAUSAL, BIDIRECTIONAL, PACKABLE or SEEN.
    mark: neither 1 nor the number of queries, so that nobody's own mask has it.
    int32: length is how many keys the mask function was told of.
        rows is 0: all queries and keys are tokens.
        otherwise [:, :4, 0, 0] are the spans of those that are: see masks.spans.
    bool: [:, 0, 0] says which of the first `length` keys are tokens, of which the last are the queries. If SEEN, which
        of all keys the only query sees.
"""

from __future__ import annotations

import torch

from flashxla.transformers.once import once

# PACKABLE is causal, too, and leaves it to the positions where sequences begin. Spans need four places.
KINDS = CAUSAL, BIDIRECTIONAL, PACKABLE, SEEN = 4, 5, 6, 7


def everything(kind: int, queries: int, keys: int, device: torch.device | str | None) -> torch.Tensor:
    """All queries and keys are tokens."""
    return torch.empty((0, kind, _mark(queries), keys), dtype=torch.int32, device=device)


def with_spans(spans: torch.Tensor, kind: int, queries: int, keys: int) -> torch.Tensor:
    """spans: int32 [B, 4]."""
    places = torch.nn.functional.pad(spans, (0, kind - spans.shape[1]))
    return places[:, :, None, None].expand(-1, -1, _mark(queries), keys)


def with_keys(keys: torch.Tensor, kind: int, queries: int) -> torch.Tensor:
    """keys: bool [B, M]."""
    return keys[:, None, None].expand(-1, kind, _mark(queries), -1)


def is_statement(mask: torch.Tensor, queries: int) -> bool:
    """Whether a mask is one of these, not a caller's."""
    return (
        mask.dim() == 4
        and mask.dtype in (torch.int32, torch.bool)
        and mask.shape[1] in KINDS
        and mask.shape[2] == _mark(queries)
    )


def kind_of(statement: torch.Tensor) -> int:
    """One of KINDS."""
    return statement.shape[1]


def fits(statement: torch.Tensor, keys: int) -> bool:
    """Whether the mask function was told of as many keys. A static cache has more than those that may be tokens."""
    told = statement.shape[3]
    return told <= keys if is_of_tokens(statement) else told == keys


def is_of_tokens(statement: torch.Tensor) -> bool:
    """Whether it says of each key whether it is a token."""
    return statement.dtype == torch.bool and kind_of(statement) != SEEN


def spans_in(statement: torch.Tensor) -> torch.Tensor | None:
    """int32 [B, 4], the same tensor for each layer; None if all are tokens."""
    if statement.shape[0] == 0:
        return None
    # A copy, as below: a view may keep alive what it is of, by which `once` finds it.
    return once(statement, "spans", lambda: statement[:, :4, 0, 0].clone())


def keys_in(statement: torch.Tensor) -> torch.Tensor:
    """bool [B, M], the same tensor for each layer."""
    return once(statement, "keys", lambda: statement[:, 0, 0].clone())


def _mark(queries: int) -> int:
    return 3 if queries == 2 else 2
