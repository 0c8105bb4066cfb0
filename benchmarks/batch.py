"""Tensors of a shape: several input sets over one pool of shuffled pages, so that no cache of the GPU serves them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable
from typing import Any

import torch

from benchmarks import shapes
from benchmarks.shapes import Shape

_COLD_BYTES = 200 * 2**20  # more than three times the largest L2 cache
_MAX_SETS = 48


@dataclasses.dataclass(frozen=True)
class Batch:
    """q [T, Hq, D] and a block table of each set; the caches and the offsets are common.

    caches: (K, V), or one tensor of both for the layout "interleaved".
    """

    shape: Shape
    q: list[torch.Tensor]
    tables: list[torch.Tensor]
    caches: tuple[torch.Tensor, ...]
    keys: torch.Tensor  # [P, B, Hk, D], whatever the layout
    values: torch.Tensor
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    lens_k: torch.Tensor
    num_seqs: torch.Tensor
    slopes: torch.Tensor | None  # of ALiBi, float32 [Hq]
    sinks: torch.Tensor | None  # float32 [Hq]

    @property
    def sets(self) -> int:
        """How many there are."""
        return len(self.q)

    @functools.cached_property
    def dense(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V [Tk, Hk, D] of each set."""
        return [self._gathered(table) for table in self.tables]

    def dense_of(self, which: int, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one sequence of a set."""
        slots = self._slots(self.tables[which], sequence)
        return rows(self.keys, slots), rows(self.values, slots)

    def _gathered(self, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slots = torch.cat([self._slots(table, i) for i in range(len(self.shape.lens))])
        return rows(self.keys, slots), rows(self.values, slots)

    def _slots(self, table: torch.Tensor, sequence: int) -> torch.Tensor:
        page, keys = self.shape.page, self.shape.lens[sequence][1]
        pages = table[sequence, : self.shape.pages[sequence]].long()
        return (pages[:, None] * page + torch.arange(page, device=table.device)).flatten()[:keys]


def rows(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Those slots of a cache [P, B, Hk, D]."""
    flat = cache.flatten(0, 1)
    if flat.dtype.itemsize > 1:
        return flat[slots]
    return flat.view(torch.uint8)[slots].view(cache.dtype)  # not every PyTorch indexes float8


def torch_dtype(name: str) -> torch.dtype:
    """Of a shape's name of it."""
    dtype = getattr(torch, {"fp8_e4m3": "float8_e4m3fn"}.get(name, name))
    assert isinstance(dtype, torch.dtype)
    return dtype


def num_sets(shape: Shape, device: str) -> int:
    """Enough to fill the caches of the GPU several times; at least two."""
    if device == "cpu":
        return 2
    one = shapes.kv_bytes(shape) + shapes.qo_bytes(shape)
    return min(_MAX_SETS, max(2, math.ceil(_COLD_BYTES / one)))


def build(shape: Shape, device: str) -> Batch:
    """Random numbers, shuffled pages."""
    sets = num_sets(shape, device)
    total = sum(shape.pages)
    q_heads, kv_heads = shape.heads
    kv_dtype = torch_dtype(shape.cache_dtype)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device, dtype=torch_dtype(shape.dtype))

    keys, values = (normal(sets * total, shape.page, kv_heads, dim).to(kv_dtype) for dim in shape.dims)
    order = torch.randperm(sets * total, device=device, dtype=torch.int32).view(sets, total)
    return Batch(
        shape=shape,
        q=[normal(shape.tokens, q_heads, shape.dim).to(torch_dtype(shape.query_dtype)) for _ in range(sets)],
        tables=[_table(shape, pages) for pages in order],
        caches=_caches(keys, values, shape.layout),
        keys=keys,
        values=values,
        slopes=torch.rand(q_heads, device=device) if shape.alibi else None,
        sinks=torch.randn(q_heads, device=device) if shape.sinks else None,
        **_lengths(shape, device),
    )


def part(whole: Batch, first: int, end: int) -> Batch:
    """The sequences first..end-1 of a batch without padding, over the same caches."""
    lens = whole.shape.lens
    start, stop = (sum(new for new, _ in lens[:i]) for i in (first, end))
    shape = dataclasses.replace(whole.shape, lens=lens[first:end])
    device = whole.cu_q.device.type
    return dataclasses.replace(
        whole,
        shape=shape,
        q=[q[start:stop] for q in whole.q],
        tables=[table[first:end, : shape.width].contiguous() for table in whole.tables],
        **_lengths(shape, device),
    )


def _table(shape: Shape, pages: torch.Tensor) -> torch.Tensor:
    table = pages.new_zeros(shape.num_seqs, shape.width)
    for row, mine in zip(table, pages.split(list(shape.pages)), strict=False):
        row[: len(mine)] = mine
    return table


def _caches(keys: torch.Tensor, values: torch.Tensor, layout: str) -> tuple[torch.Tensor, ...]:
    if layout == "NHD":
        return keys, values
    if layout == "HND":
        return keys.transpose(1, 2).contiguous(), values.transpose(1, 2).contiguous()
    return (torch.stack([keys, values], dim=3).flatten(2, 3),)


def _lengths(shape: Shape, device: str) -> dict[str, Any]:
    """The offsets and the lengths of a batch; padded sequences are empty."""
    missing = [0] * (shape.num_seqs - len(shape.lens))
    new, keys = ([*lens, *missing] for lens in zip(*shape.lens, strict=True))

    def tensor(numbers: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(numbers), dtype=torch.int32, device=device)

    return {
        "cu_q": tensor(itertools.accumulate(new, initial=0)),
        "cu_k": tensor(itertools.accumulate(keys, initial=0)),
        "lens_k": tensor(keys),
        "num_seqs": tensor([len(shape.lens)]),
    }
