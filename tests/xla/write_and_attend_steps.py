"""Decodes through ragged_paged_attention on XLA tensors, and prints whether its caches stay where they are.

A process of its own: `python -m tests.xla.write_and_attend_steps`, with XLA_FLAGS that dump the programs. Each route
has a number of blocks of its own, by which its programs are known.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch_xla

import flashxla.torch as fx

LAYERS, STEPS = 2, 3
B, H, D = 16, 2, 64
BLOCKS = {"lazy": 40, "openxla": 48}


def step(x: Any, caches: Any, meta: Any) -> Any:
    """A layer with a pair of caches, one with one tensor for both."""
    lengths, tables, starts, num_seqs = meta
    for cache in caches:
        x = fx.ragged_paged_attention(
            x, x[:, :H], x[:, H:], cache, lengths, tables, starts, num_seqs, D**-0.5
        )
    return x


def pointers(caches: Any) -> list[int]:
    torch_xla.sync(wait=True)
    return [torch_xla._XLAC._unsafe_buffer_pointer(t) for t in flat(caches)]


def flat(caches: Any) -> list[torch.Tensor]:
    pair, one = caches
    return [*pair, one]


def empty(blocks: int, device: Any) -> Any:
    pair = tuple(torch.zeros(blocks, B, H, D, device=device) for _ in "kv")
    return pair, torch.zeros(blocks, B, 2 * H, D, device=device)


def run(route: str) -> dict[str, Any]:
    device, blocks = torch_xla.device(), BLOCKS[route]
    caches, plain = empty(blocks, device), empty(blocks, "cpu")
    compiled = torch.compile(step, backend="openxla") if route == "openxla" else step
    before, stay, error = pointers(caches), True, 0.0
    for number in range(STEPS):
        x = torch.randn(3, 2 * H, D)
        index = ([number + 1] * 3, [[0], [blocks - 1], [7]], [0, 1, 2, 3], [3])
        meta = [torch.tensor(values, dtype=torch.int32) for values in index]
        out = compiled(x.to(device), caches, [t.to(device) for t in meta])
        stay &= pointers(caches) == before
        error = max(error, (out.cpu() - step(x, plain, meta)).abs().max().item())
    # The second layer's keys are the first one's results, which differ in their last bits.
    pairs = zip(flat(caches), flat(plain), strict=True)
    same = all(torch.allclose(t.cpu(), p, atol=1e-5) for t, p in pairs)
    return {"stay": stay, "error": error, "same_caches": same}


if __name__ == "__main__":
    print(json.dumps({route: run(route) for route in BLOCKS}))
