"""A runner without a model: its "attention" reads the tokens back from a paged cache of token ids.

The next token is a function of a sequence's whole history as the cache holds it, so a wrong slot, a wrong
table or a block that two sequences share changes the text.
"""

from __future__ import annotations

import zlib

import torch

from flashxla.generate.batch import StepInputs
from flashxla.generate.scheduler import Limits

VOCABULARY = 50


def next_token(history: list[int]) -> int:
    return zlib.crc32(bytes(history)) % VOCABULARY


class FakeRunner:
    """Checks the padding of every step too."""

    device = "nowhere"

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.cache = torch.full((limits.num_blocks * limits.block_size,), 255)
        self.shapes: set[int] = set()

    def run(self, inputs: StepInputs) -> torch.Tensor:
        num_seqs = int(inputs.num_seqs)
        starts = inputs.query_start_loc.tolist()
        count = starts[num_seqs]
        self.shapes.add(inputs.input_ids.shape[1])
        assert 1 <= num_seqs <= self.limits.max_seqs
        assert all(start == count for start in starts[num_seqs:])

        logits = torch.zeros(self.limits.max_seqs, VOCABULARY)
        for row in range(num_seqs):
            length = int(inputs.context_lens[row])
            query = starts[row + 1] - starts[row]
            assert inputs.position_ids[0, starts[row] : starts[row + 1]].tolist() == list(
                range(length - query, length)
            )
            assert int(inputs.logits_rows[row]) == starts[row + 1] - 1
            positions = torch.arange(length)
            blocks = inputs.block_tables[row, positions // self.limits.block_size]
            slots = blocks * self.limits.block_size + positions % self.limits.block_size
            # The new tokens are the last of the sequence's keys, and are written where those lie.
            self.cache[slots[length - query :]] = inputs.input_ids[0, starts[row] : starts[row + 1]]
            history = self.cache[slots]
            logits[row, next_token(history.tolist())] = 1
        return logits

    def compiled_programs(self) -> None:
        return None
