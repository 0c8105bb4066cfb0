"""One prompt and what has been generated for it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(eq=False)
class Sequence:
    """A sequence on its way through the scheduler.

    index: its place in the order of arrival.
    max_tokens: how many tokens to generate at most.
    computed: how many of its tokens have their keys and values in the cache.
    blocks: the cache blocks it owns, in order.
    """

    index: int
    prompt: list[int]
    max_tokens: int
    output: list[int] = dataclasses.field(default_factory=list)
    computed: int = 0
    blocks: list[int] = dataclasses.field(default_factory=list)
    preemptions: int = 0

    @property
    def length(self) -> int:
        """Prompt and generated tokens together."""
        return len(self.prompt) + len(self.output)

    @property
    def remaining(self) -> int:
        """Tokens whose keys and values are not in the cache yet."""
        return self.length - self.computed

    def tokens(self, start: int, stop: int) -> list[int]:
        """The tokens at positions start to stop."""
        return (self.prompt + self.output)[start:stop]
