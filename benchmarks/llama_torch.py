"""The decode step of `llama_jax` in PyTorch: the same weights and maths, functions of tensors on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

import flashxla.torch as fx
from benchmarks.llama import PAGE, Config

Params = dict[str, Any]
Batch = dict[str, torch.Tensor]
Cache = tuple[torch.Tensor, torch.Tensor]
# (q [S, Hq, D], k [S, Hk, D], v, a layer's cache, batch) -> out [S, Hq, D]; writes into the cache
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Cache, Batch], torch.Tensor]


def init(config: Config, dtype: torch.dtype, device: Any, sync: Callable[[], Any] = lambda: None) -> Params:
    """Random weights, made on the device; sync: called after each layer, so that nothing piles up."""

    def normal(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, dtype=dtype, device=device) * rows**-0.5

    def norm() -> torch.Tensor:
        return torch.ones(config.hidden, dtype=dtype, device=device)

    layers = []
    for _ in range(config.layers):
        matrices = {name: normal(*shape) for name, shape in config.matrices.items()}
        layers.append({**matrices, "norm_1": norm(), "norm_2": norm()})
        sync()
    embed, head = normal(config.vocab, config.hidden), normal(config.hidden, config.vocab)
    return {"embed": embed, "layers": layers, "norm": norm(), "head": head}


def caches(
    config: Config, pages: int, dtype: torch.dtype, device: Any, sync: Callable[[], Any] = lambda: None
) -> list[Cache]:
    """Random keys and values, tensors of its own for each layer."""
    shape = (pages, PAGE, config.heads[1], config.dim)

    def normal() -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    found = []
    for _ in range(config.layers):
        found.append((normal(), normal()))
        sync()
    return found


def step(
    config: Config,
    attend: Attend,
    params: Params,
    caches: Sequence[Cache],
    tokens: torch.Tensor,
    batch: Batch,
) -> torch.Tensor:
    """Logits [S, vocab] of the next tokens; the caches are updated in place."""
    x = functional.embedding(tokens, params["embed"])
    rotation = _rotation(config, batch["context_lens"] - 1)
    q_width, kv_width = config.widths
    for layer, cache in zip(params["layers"], caches, strict=True):
        qkv = _norm(config, x, layer["norm_1"]) @ layer["qkv"]
        q, k, v = (
            part.reshape(len(tokens), -1, config.dim)
            for part in qkv.split((q_width, kv_width, kv_width), dim=-1)
        )
        out = attend(_rotated(q, rotation), _rotated(k, rotation), v, cache, batch)
        x = x + out.reshape(len(tokens), -1) @ layer["out"]
        gate, up = (_norm(config, x, layer["norm_2"]) @ layer["gate_up"]).chunk(2, dim=-1)
        x = x + (functional.silu(gate) * up) @ layer["down"]
    return _norm(config, x, params["norm"]) @ params["head"]


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Cache, batch: Batch) -> torch.Tensor:
    """The write and the attention with flashxla."""
    fx.reshape_and_cache_flash(k, v, *cache, batch["slots"])
    return fx.paged_attention(
        q,
        cache,
        batch["context_lens"],
        batch["tables"],
        batch["starts"],
        batch["num_seqs"],
        q.shape[-1] ** -0.5,
    )


def gather(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Cache, batch: Batch) -> torch.Tensor:
    """The same in plain PyTorch: every key of a sequence is gathered, then softmax."""
    block, offset = batch["slots"].long() // PAGE, batch["slots"].long() % PAGE
    for pages, new in zip(cache, (k, v), strict=True):
        pages[block, offset] = new
    keys, values = (
        pages[batch["tables"].long()].reshape(len(q), -1, *k.shape[1:]).float() for pages in cache
    )
    grouped = q.float().reshape(len(q), k.shape[1], -1, q.shape[-1]) * q.shape[-1] ** -0.5
    scores = torch.einsum("shgd,skhd->shgk", grouped, keys)
    real = torch.arange(keys.shape[1], device=q.device) < batch["context_lens"][:, None]
    weights = scores.masked_fill(~real[:, None, None], -torch.inf).softmax(dim=-1)
    return torch.einsum("shgk,skhd->shgd", weights, values).reshape(q.shape).to(q.dtype)


def _norm(config: Config, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + config.eps)
    return (wide * scale).to(x.dtype) * weight


def _rotation(config: Config, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    even = torch.arange(0, config.dim, 2, dtype=torch.float32, device=positions.device)
    angles = positions[:, None].float() * config.theta ** (-even / config.dim)
    return angles.cos()[:, None], angles.sin()[:, None]


def _rotated(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, sin = rotation
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
