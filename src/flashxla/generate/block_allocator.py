"""Hands out the blocks of a paged cache."""

from __future__ import annotations

from collections.abc import Iterable


class BlockAllocator:
    """A free list of block numbers. Every block is either free or owned once."""

    def __init__(self, num_blocks: int) -> None:
        # Popped from the end: low numbers go first, and a block just freed is the next to be used.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._owned: set[int] = set()

    @property
    def num_free(self) -> int:
        """How many blocks are free."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks. Raises RuntimeError, changing nothing, when fewer are free."""
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks asked for, {len(self._free)} are free")
        blocks = [self._free.pop() for _ in range(count)]
        self._owned.update(blocks)
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back. Raises RuntimeError for a block that is not owned."""
        for block in blocks:
            if block not in self._owned:
                raise RuntimeError(f"block {block} was freed but is not owned")
            self._owned.remove(block)
            self._free.append(block)
