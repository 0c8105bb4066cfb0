"""What a layer of a model calls: the cache write, then the attention of one new token of each sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

import flashxla.torch as fx
from flashxla.bench.gpu import contenders
from flashxla.bench.gpu.batch import Batch, rows
from flashxla.bench.gpu.compare import Prepared


@dataclasses.dataclass(frozen=True)
class Newest:
    """The newest token of each sequence of a set, which the cache holds already: writing it changes nothing."""

    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor


def newest(batch: Batch, which: int) -> Newest:
    """Of a set."""
    page = batch.shape.page
    last = batch.lens_k.long() - 1
    blocks = batch.tables[which].gather(1, (last // page)[:, None])[:, 0].long()
    slots = blocks * page + last % page
    return Newest(rows(batch.keys, slots), rows(batch.values, slots), slots)


def in_torch(batch: Batch, sets: int) -> Prepared:
    """The pair on the first `sets` input sets."""

    def pair(new: Newest, attend: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            fx.reshape_and_cache_flash(new.key, new.value, batch.keys, batch.values, new.slots)
            return attend()

        return call

    attends = contenders.paged_calls(batch)[:sets]
    calls = [pair(newest(batch, i), attend) for i, attend in enumerate(attends)]
    return contenders.from_torch(batch, calls, ours=True)
