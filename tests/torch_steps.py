"""A step of a layer for the tests of TorchTPU and torchax: new keys and values, and attention over the cache."""

from __future__ import annotations

import torch

import flashxla.torch as fx

BLOCKS, BLOCK, KV_HEADS, HEADS, SIZE, TOKENS = 16, 16, 2, 4, 32, 5


def arguments() -> list[torch.Tensor]:
    """Key, value, two caches, slots, query, lengths, tables, offsets and the number of sequences, on the CPU."""
    new = torch.randn(2, TOKENS, KV_HEADS, SIZE)
    caches = torch.randn(2, BLOCKS, BLOCK, KV_HEADS, SIZE)
    index = [[19, 20, 32, 81, -1], [5, 17, 3], [[1, 0], [2, 3], [5, 0]], [0, 2, 3, 4], [3]]
    slots, *rest = [torch.tensor(x, dtype=torch.int32) for x in index]
    return [
        new[0],
        new[1],
        caches[0].clone(),
        caches[1].clone(),
        slots,
        torch.randn(TOKENS, HEADS, SIZE),
        *rest,
    ]


def write_and_attend(key, value, key_cache, value_cache, slots, query, lengths, tables, offsets, count):
    """The attention's result; the caches are updated."""
    fx.reshape_and_cache_flash(key, value, key_cache, value_cache, slots)
    return fx.paged_attention(query, (key_cache, value_cache), lengths, tables, offsets, count, 0.125)


def expected(given: list[torch.Tensor], steps: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result and the caches on PyTorch's own CPU."""
    copies = [x.clone() for x in given]
    for _ in range(steps):
        out = write_and_attend(*copies)
    return out, copies[2], copies[3]
