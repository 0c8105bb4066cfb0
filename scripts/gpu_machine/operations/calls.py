"""calls.py TABLE...: how long calls of attention on a paged cache take, us, each on several input sets.

decode: a token a sequence. queries: 2 to 16 of them. chunks: the next tokens of a prompt after a long context. mixed:
prompts beside decode. DEVICE=cuda|cpu QUICK=1
"""

from __future__ import annotations

import dataclasses
import functools
import os
import statistics
from collections.abc import Mapping
from typing import Any

from tables import print_chosen

from benchmarks import attention, batch, shapes, timers
from benchmarks.shapes import Lens, Shape, newest

ROUNDS = 5


def _shapes(lens: dict[str, Lens], unlike: Mapping[str, Mapping[str, Any]]) -> list[Shape]:
    """Plain shapes, and then the first of them with what is unlike."""
    first, *others = (Shape(name, of) for name, of in lens.items())
    changed = (
        dataclasses.replace(first, name=f"{first.name}, {name}", **fields) for name, fields in unlike.items()
    )
    return [first, *others, *changed]


_FP8 = {"cache": "fp8_e4m3"}
_UNLIKE: dict[str, dict[str, Any]] = {
    "D 64": {"dim": 64},
    "D 256": {"dim": 256, "heads": (16, 4)},
    "MQA": {"heads": (32, 1)},
    "8/1": {"heads": (8, 1)},
    "fp8 cache": _FP8,
    "all fp8": {**_FP8, "queries": "fp8_e4m3"},
}
SHAPES = {
    "decode": _shapes(
        {
            f"{count}x{keys}": newest(*[keys] * count)
            for count, keys in (
                *((64, 2048), (8, 16384), (128, 1024), (256, 512), (1, 1024), (1, 4096)),
                *((16, 512), (1024, 128), (4096, 32)),
            )
        },
        {**_UNLIKE, "D 96": {"dim": 96}, "D 192": {"dim": 192}},
    ),
    "queries": _shapes(
        {f"{count} queries, 64x2k": ((count, 2048),) * 64 for count in (4, 2, 8, 12, 16)}, _UNLIKE
    ),
    "chunks": _shapes(
        {
            f"{new} of {keys}": ((new, keys),)
            for new, keys in (
                *((count, 16384) for count in (256, 16, 32, 47, 64, 128, 192, 384, 512, 768)),
                *((128, 65536), (256, 65536), (128, 2048)),
            )
        },
        _UNLIKE,
    ),
    "mixed": _shapes(
        {
            f"{rows} rows of {keys} + {new} of {of}": (*newest(*[keys] * rows), (new, of))
            for rows, keys, new, of in (
                *((64, 2048, 2048, 2048), (64, 2048, 2048, 16384)),
                *((8, 4096, 512, 512), (64, 2048, 64, 2048)),
            )
        },
        {},
    ),
}


def quick(shape: Shape) -> Shape:
    """A small one of that kind: does it run?"""
    lens = tuple(dict.fromkeys((min(new, 8), min(keys, 40)) for new, keys in shape.lens))
    return dataclasses.replace(shape, lens=lens, heads=(shape.heads[0] // shape.heads[1] * 2, 2))


def table(name: str) -> None:
    """Each shape's time, and how fast it reads its keys and values."""
    for shape in map(quick, SHAPES[name]) if os.environ.get("QUICK") else SHAPES[name]:
        calls = attention.paged_calls(batch.build(shape, os.environ.get("DEVICE", "cuda")))
        timer = timers.of_torch(calls, os.environ.get("DEVICE", "cuda"))
        us = statistics.median(timer.sample() for _ in range(ROUNDS)) * 1e6
        print(f"{name} {shape.name}: {us:.1f} us {shapes.kv_bytes(shape) / us / 1e6:.2f} TB/s", flush=True)


if __name__ == "__main__":
    print_chosen({name: functools.partial(table, name) for name in SHAPES}, __doc__)
