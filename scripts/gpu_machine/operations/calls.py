"""calls.py TABLE...: how long calls of attention on a paged cache take, us, each on several input sets.

decode: a token a sequence, as `flashxla bench decode --all`. queries: 2 to 64 of them. chunks: the next tokens of a
prompt after a long context. mixed: prompts beside decode. DEVICE=cuda|cpu QUICK=1
"""

from __future__ import annotations

import dataclasses
import functools
import os
import statistics

from tables import print_chosen

from benchmarks import attention, batch, shape_lists, shapes, timers
from benchmarks.shape_lists import ALL_FP8, FP8_CACHE, HEAD_SIZES, HEADS, changed
from benchmarks.shapes import Shape, newest

DEVICE = os.environ.get("DEVICE", "cuda")
ROUNDS = 5


def _also_changed(*shapes: Shape) -> tuple[Shape, ...]:
    """The shapes, and the first of them with other heads and caches."""
    caches = {"fp8 cache": FP8_CACHE, "all fp8": ALL_FP8}
    return *shapes, *changed(shapes[0], {**HEAD_SIZES, **HEADS, **caches})


def _queries(count: int) -> Shape:
    return Shape(f"64 x 2k, {count} queries each", ((count, 2048),) * 64)


def _chunk(new: int, keys: int = 16) -> Shape:
    return Shape(f"{new} new of {keys}k", ((new, keys * 1024),))


SHAPES = {
    "decode": (*shape_lists.DECODE, *shape_lists.DECODE_MORE),
    "queries": _also_changed(*map(_queries, (4, 2, 8, 12, 16, 32, 48, 64))),
    "chunks": _also_changed(
        *map(_chunk, (256, 16, 32, 47, 64, 128, 192, 384, 512, 768)),
        *(_chunk(128, 64), _chunk(256, 64), _chunk(128, 2)),
    ),
    "mixed": (
        *shape_lists.MIXED,
        Shape("8 decode rows of 4k + 512 new of 512", (*newest(*[4096] * 8), (512, 512))),
        Shape("64 decode rows of 2k + 64 new of 2k", (*newest(*[2048] * 64), (64, 2048))),
    ),
}


def quick(shape: Shape) -> Shape:
    """A small one of that kind: does it run?"""
    lens = tuple(dict.fromkeys((min(new, 8), min(keys, 40)) for new, keys in shape.lens))
    heads = (shape.heads[0] // shape.heads[1] * 2, 2)
    return dataclasses.replace(shape, lens=lens, heads=heads, seqs=None, table_width=None)


def table(name: str) -> None:
    """Each shape's time, and how fast it reads its keys and values."""
    for shape in map(quick, SHAPES[name]) if os.environ.get("QUICK") else SHAPES[name]:
        timer = timers.of_torch(attention.paged_calls(batch.build(shape, DEVICE)), DEVICE)
        us = statistics.median(timer.sample() for _ in range(ROUNDS)) * 1e6
        print(f"{name} {shape.name}: {us:.1f} us {shapes.kv_bytes(shape) / us / 1e6:.2f} TB/s", flush=True)


if __name__ == "__main__":
    print_chosen({name: functools.partial(table, name) for name in SHAPES}, __doc__)
