"""Decides which tokens of which sequences a step computes."""

from __future__ import annotations

import dataclasses
from collections import deque

from flashxla.generate.block_allocator import BlockAllocator
from flashxla.generate.errors import GenerateError
from flashxla.generate.sequence import Sequence


@dataclasses.dataclass(frozen=True)
class Limits:
    """The sizes that every step keeps to; they fix the shapes of the compiled programs.

    max_length: longest sequence in tokens, by the model's positions and the cache's size.
    """

    num_blocks: int
    block_size: int
    max_batch_tokens: int
    max_seqs: int
    max_length: int

    @property
    def blocks_per_sequence(self) -> int:
        """The width of a block table."""
        return self.blocks_for(self.max_length)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold that many tokens."""
        return -(-tokens // self.block_size)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The tokens [start, start + count) of a sequence, computed in one step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def completes(self) -> bool:
        """Whether the sequence's last token is among them, so that its logits give the next token."""
        return self.start + self.count == self.sequence.length


class Scheduler:
    """Continuous batching over a paged cache.

    Running sequences get at least one token a step; prefill fills up the rest of the budget, in chunks. When
    blocks run out, the youngest running sequence is preempted: it loses its blocks, keeps its tokens, and is
    computed again later. Sequences start in the order of arrival, so all that run are older than all that
    wait: the oldest always advances, and every sequence finishes.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.allocator = BlockAllocator(limits.num_blocks)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises GenerateError for a prompt that can never run."""
        limits = self.limits
        length = len(sequence.prompt)
        cache = limits.num_blocks * limits.block_size
        if length == 0:
            raise GenerateError(f"prompt {sequence.index + 1}: got no tokens; accepted: at least one")
        if length > cache:
            raise GenerateError(
                f"prompt {sequence.index + 1}: got {length} tokens; accepted: at most {cache}, the size of "
                f"the cache (--num-blocks {limits.num_blocks} x --block-size {limits.block_size})"
            )
        if length > limits.max_length:
            raise GenerateError(
                f"prompt {sequence.index + 1}: got {length} tokens; accepted: at most {limits.max_length}, "
                "the longest sequence of this model or --max-length"
            )
        # The last token needs no place in the cache: nothing attends to it.
        sequence.max_tokens = min(sequence.max_tokens, limits.max_length - length + 1)
        self.waiting.append(sequence)

    @property
    def busy(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.waiting or self.running)

    def schedule(self) -> list[Chunk]:
        """Choose the next step's chunks, oldest sequence first, and give them blocks."""
        chunks: list[Chunk] = []
        budget = self.limits.max_batch_tokens
        position = 0
        preempted = False
        while position < len(self.running):
            sequence = self.running[position]
            younger = len(self.running) - position - 1
            count = min(sequence.remaining, budget - younger)
            if self._blocks_missing(sequence, count) > self.allocator.num_free:
                self._preempt_youngest()
                preempted = True
                continue
            chunks.append(self._take(sequence, count))
            budget -= count
            position += 1
        # Blocks that a preemption freed belong to the sequences that were short of them.
        while not preempted and self.waiting and budget and len(self.running) < self.limits.max_seqs:
            sequence = self.waiting[0]
            # A spare block for each that runs, or the newcomer could be preempted in the very next step.
            if self.limits.blocks_for(sequence.length) + len(self.running) > self.allocator.num_free:
                break
            self.running.append(self.waiting.popleft())
            chunks.append(self._take(sequence, min(sequence.remaining, budget)))
            budget -= chunks[-1].count
        return chunks

    def finish(self, sequence: Sequence) -> None:
        """Take a finished sequence out and free its blocks."""
        self.running.remove(sequence)
        self._release(sequence)

    def _blocks_missing(self, sequence: Sequence, count: int) -> int:
        return self.limits.blocks_for(sequence.computed + count) - len(sequence.blocks)

    def _take(self, sequence: Sequence, count: int) -> Chunk:
        sequence.blocks += self.allocator.allocate(max(0, self._blocks_missing(sequence, count)))
        chunk = Chunk(sequence, sequence.computed, count)
        sequence.computed += count
        return chunk

    def _preempt_youngest(self) -> None:
        sequence = self.running.pop()
        self._release(sequence)
        sequence.computed = 0
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.allocator.free(sequence.blocks)
        sequence.blocks = []
