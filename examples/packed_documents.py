"""The text that the training examples learn: Python's own documentation, bytes as tokens, packed into rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

VOCABULARY = 257  # the bytes, and what begins a document
BEGIN = 256
MOST_DOCUMENTS = 16  # of a row


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of documents, one after the other.

    tokens, targets, positions: int32 [B, T]; a target of -1 counts for nothing. A document's positions begin at 0.
    cu_seqlens: int32 [B, S+1], where each row's documents begin, and T at the end; S is the same for all batches.
    """

    tokens: Any  # NumPy's arrays, or a framework's
    targets: Any
    positions: Any
    cu_seqlens: Any


def batches(rows: int, tokens: int, seed: int = 0) -> Iterator[Batch]:
    """Batches without end; no document is cut but the last one of a row."""
    from pydoc_data.topics import topics

    rng = np.random.default_rng(seed)
    documents = [
        np.array([BEGIN, *text.encode()], np.int32)
        for topic in topics.values()
        for text in topic.split("\n\n")
        if len(text) > 40
    ]
    while True:
        yield _batch([_row(rng, documents, tokens) for _ in range(rows)], tokens)


def _row(rng: np.random.Generator, documents: list[np.ndarray], tokens: int) -> list[np.ndarray]:
    row: list[np.ndarray] = []
    free = tokens
    while free > 1 and len(row) < MOST_DOCUMENTS - 1:
        row.append(documents[rng.integers(len(documents))][:free])
        free -= len(row[-1])
    # What is left over is a document of its own, that nothing is learnt from.
    return [*row, np.full(free, BEGIN, np.int32)] if free else row


def _batch(rows: list[list[np.ndarray]], tokens: int) -> Batch:
    cu_seqlens = np.full((len(rows), MOST_DOCUMENTS + 1), tokens, np.int32)
    targets = np.full((len(rows), tokens), -1, np.int32)
    positions = np.zeros((len(rows), tokens), np.int32)
    for r, row in enumerate(rows):
        starts = np.cumsum([0, *(len(document) for document in row)])
        cu_seqlens[r, : len(row)] = starts[:-1]
        for start, document in zip(starts, row, strict=False):
            positions[r, start : start + len(document)] = np.arange(len(document))
            if (document != BEGIN).any():
                targets[r, start : start + len(document) - 1] = document[1:]
    return Batch(np.stack([np.concatenate(row) for row in rows]), targets, positions, cu_seqlens)
