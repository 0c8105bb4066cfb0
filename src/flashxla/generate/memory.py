"""Whether a cache fits into the machine's memory, before it is made."""

from __future__ import annotations

import math

from flashxla.generate.attention import LayerShape
from flashxla.generate.errors import GenerateError
from flashxla.generate.scheduler import Limits
from flashxla.machine import machine_bytes


def check_cache(limits: Limits, layers: list[LayerShape]) -> None:
    """Raise GenerateError for a cache that is larger than the machine's memory."""
    available = machine_bytes()
    block = sum(
        math.prod(shape) * layer.dtype.itemsize
        for layer in layers
        for shape in layer.block_shapes(limits.block_size)
    )
    if limits.num_blocks * block > available:
        raise GenerateError(
            f"--num-blocks: got {limits.num_blocks} with --block-size {limits.block_size}, "
            f"{_gib(limits.num_blocks * block)} of cache; accepted: at most {available // block} blocks of that "
            f"size, as this machine has {_gib(available)} of memory"
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.4g} GiB"
