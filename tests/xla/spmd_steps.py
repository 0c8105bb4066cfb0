"""Decodes with the heads sharded over all devices, checks every step against one device, and prints what happened.

A process of its own: `python -m tests.xla.spmd_steps`, under PyTorch/XLA's SPMD mode.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

import flashxla.torch as fx

LAYERS, STEPS = 2, 3
P, B, HK, HQ, D, S = 64, 16, 4, 8, 64, 3
HEADS, CACHE = (None, "heads", None), (None, None, "heads", None)


def attend(key: Any, value: Any, query: Any, keys: Any, values: Any, slots: Any, *meta: Any) -> Any:
    fx.reshape_and_cache_flash(key, value, keys, values, slots)
    return fx.paged_attention(query, (keys, values), *meta, D**-0.5)


def inputs(step: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Key, value and query; slots, lengths, tables, starts and num_seqs."""
    tables = torch.tensor([[0, 1], [6, 7], [20, 0]], dtype=torch.int32)
    lengths = torch.tensor([5, 16, 0], dtype=torch.int32) + step + 1
    last = lengths.long() - 1
    slots = tables[torch.arange(S), last // B] * B + (last % B).int()
    meta = [
        slots,
        lengths,
        tables,
        torch.arange(S + 1, dtype=torch.int32),
        torch.tensor([S], dtype=torch.int32),
    ]
    return [torch.randn(S, HK, D), torch.randn(S, HK, D), torch.randn(S, HQ, D)], meta


def main() -> None:
    xr.use_spmd()
    count = xr.global_runtime_device_count()
    mesh = xs.Mesh(np.arange(count), (count,), ("heads",))
    device = torch_xla.device()
    sharded = fx.shard_map(
        attend, mesh, (HEADS, HEADS, HEADS, CACHE, CACHE, *[None] * 5), (HEADS,), updated=(3, 4)
    )

    def put(tensor: torch.Tensor, spec: tuple[Any, ...] | None = None) -> Any:
        tensor = tensor.to(device)
        if spec:
            xs.mark_sharding(tensor, mesh, spec)
        return tensor

    torch.manual_seed(0)
    expected = [[torch.randn(P, B, HK, D) for _ in range(2)] for _ in range(LAYERS)]
    caches = [[put(cache, CACHE) for cache in layer] for layer in expected]
    torch_xla.sync(wait=True)
    error = 0.0
    for step in range(STEPS):
        heads, meta = inputs(step)
        out, new = torch.zeros(S, HQ, D), put(torch.zeros(S, HQ, D), HEADS)
        rest = [put(tensor) for tensor in meta]
        key, value, query = (put(tensor, HEADS) for tensor in heads)
        for layer in range(LAYERS):
            out = attend(heads[0], heads[1], heads[2] + out, *expected[layer], *meta)
            new = sharded(key, value, query + new, *caches[layer], *rest)
        torch_xla.sync(wait=True)
        error = max(error, (new.cpu() - out).abs().max().item())
    for layer, right in zip(caches, expected, strict=True):
        error = max(error, *((a.cpu() - b).abs().max().item() for a, b in zip(layer, right, strict=True)))
    specs = {torch_xla._XLAC._get_xla_sharding_spec(cache) for layer in caches for cache in layer}

    # Outside of a shard_map: right, and a warning for what is gathered.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gathered = fx.paged_attention(new, tuple(caches[0]), *rest[1:], D**-0.5)
        right = fx.paged_attention(new.cpu(), tuple(expected[0]), *meta[1:], D**-0.5)
        error = max(error, (gathered.cpu() - right).abs().max().item())
    messages = [str(w.message) for w in caught if "paged_attention" in str(w.message)]
    found = {"devices": count, "error": error, "specs": sorted(specs), "warnings": messages}
    print(json.dumps({**found, "batch_error": batch_error(mesh, count, put)}))


def batch_error(mesh: Any, count: int, put: Any) -> float:
    """Dense attention of a batch that is sharded over its sequences."""
    rows = ("heads", None, None, None)
    sharded = fx.shard_map(
        lambda q, k, v: fx.flash_attn_func(q, k, v, causal=True), mesh, (rows, rows, rows), (rows,)
    )
    given = [torch.randn(2 * count, 20, heads, D) for heads in (HQ, HK, HK)]
    out = sharded(*(put(tensor, rows) for tensor in given))
    expected = fx.flash_attn_func(*given, causal=True)
    return (out.cpu() - expected).abs().max().item()


if __name__ == "__main__":
    main()
