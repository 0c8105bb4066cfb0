"""What the command line asks for."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a run measures."""

    device: str = "cuda"
    dtype: str = "bfloat16"
    rounds: int = 12  # samples of each contender in each of the two passes
    peers: bool = False
    quick: bool = False  # tiny shapes
    everything: bool = False  # more shapes of ours: layouts, page sizes, head sizes, masks
    only: str = ""  # the cases whose names hold this text
    profile: bool = False  # also which kernels ran inside the jitted programs
    avoid: tuple[tuple[str, str], ...] = ()  # (case, contender) that crashed or hung before

    @property
    def cuda(self) -> bool:
        """Whether there is a GPU."""
        return self.device == "cuda"
