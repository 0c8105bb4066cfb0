"""Windows of places of which not all are tokens: which keys each query sees."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flashxla.transformers import rows
from tests.transformers.conftest import drawn
from tests.transformers.test_models import MASKS

ROWS, KEYS = 3, 21


def seen(tokens: np.ndarray, queries: int, sides: tuple[int, int]) -> list[list[list[int]]]:
    """Of each row, of each query that is a token: the places of the keys in its window."""
    left, right = sides
    first = tokens.shape[1] - queries
    return [
        [
            [j for j in range(place - left, place + right + 1) if 0 <= j < len(row) and row[j]]
            for place in range(first, len(row))
            if row[place]
        ]
        for row in tokens
    ]


def attended(tokens: torch.Tensor, queries: int, sides: tuple[int, int]) -> list[list[list[int]]]:
    """The same, of the sequences that flash_attn_varlen_func gets."""
    left, right = sides
    order_q, order_k, spans = rows.together(tokens, queries)
    offsets, first_keys, used = rows.windowed(tokens, queries, sides)
    assert used is not None
    # One by one below.
    order_q, order_k, spans, offsets, first_keys, used = (
        x.cpu() for x in (order_q, order_k, spans, offsets, first_keys, used)
    )
    assert all(x.dtype == torch.int32 for x in (offsets, first_keys, used))
    assert (offsets.diff() >= 0).all() and (first_keys.diff() >= 0).all()
    assert offsets[0] == 0 and offsets[-1] == order_q.numel() and first_keys[-1] <= order_k.numel()
    found: dict[int, list[int]] = {}
    for begin, end, key, count in zip(offsets[:-1], offsets[1:], first_keys[:-1], used, strict=True):
        for query in range(begin, end):
            diagonal = int(count - (end - query))  # aligned to the last key
            visible = range(max(diagonal - left, 0), diagonal + 1) if right == 0 else range(count)
            row, _ = divmod(query, queries)
            keys = [int(key) + j for j in visible]
            assert all(j // KEYS == row for j in keys)
            found[query] = sorted(order_k[row, j % KEYS].item() for j in keys)
    counts = spans[:, 1].tolist()
    for row, count in enumerate(counts):
        assert not any(found[row * queries + i] for i in range(count, queries)), "padding sees something"
    return [[found[row * queries + i] for i in range(count)] for row, count in enumerate(counts)]


@pytest.mark.parametrize("queries", [KEYS, 6, 1])
@pytest.mark.parametrize("sides", [(0, 0), (1, 0), (6, 0), (40, 0), (1, 1), (3, 3), (40, 40)], ids=str)
def test_windows_with_holes(sides: tuple[int, int], queries: int) -> None:
    masks = [torch.tensor(mask).bool() for mask in MASKS.values() if mask]
    masks += [
        drawn(torch.rand, queries + i, ROWS, KEYS) < share for i, share in enumerate((0.2, 0.5, 0.9, 0.95))
    ]
    for tokens in masks:
        assert attended(tokens, queries, sides) == seen(tokens.cpu().numpy(), queries, sides)


@pytest.mark.parametrize("mask", ["left", "right", "both"])
def test_a_row_without_holes_is_one_sequence(mask: str) -> None:
    """As fast as where the padding is known."""
    tokens = torch.tensor(MASKS[mask]).bool()
    offsets, _, used = rows.windowed(tokens, KEYS, (6, 0))
    assert used is not None
    sizes, counts = offsets.diff(), tokens.sum(1)
    assert sizes[used > 0].tolist() == counts.tolist() == used[used > 0].tolist()
