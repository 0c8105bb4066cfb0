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
# Keys and values in one tensor, layout "stacked": [2, P, B, Hk, D]. Each tensor that a step updates costs host time.
Cache = torch.Tensor
# PyTorch's annotations have it return nothing.
_split: Any = torch.split_copy
# (config, qkv [S, Hq + 2 Hk, D], a layer's cache, batch) -> out [S, Hq, D]; writes into the cache
Attend = Callable[[Config, torch.Tensor, Cache, Batch], torch.Tensor]


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
    """Random keys and values, a tensor of its own for each layer."""
    shape = (2, pages, PAGE, config.heads[1], config.dim)
    found = []
    for _ in range(config.layers):
        found.append(torch.randn(shape, dtype=dtype, device=device))
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
    eps = torch.full((1, 1), config.eps, dtype=torch.float32, device=x.device)
    for layer, cache in zip(params["layers"], caches, strict=True):
        qkv = _norm(config, x, layer["norm_1"], eps) @ layer["qkv"]
        # Copies, which XLA fuses: a view of a lazy tensor costs the host more.
        rotated = _rotated(torch.view_copy(qkv, (len(tokens), -1, config.dim)), rotation)
        out = attend(config, rotated, cache, batch)
        x = torch.addmm(x, torch.view_copy(out, (len(tokens), -1)), layer["out"])
        hidden = _norm(config, x, layer["norm_2"], eps) @ layer["gate_up"]
        gate, up = _split(hidden, config.mlp, dim=-1)
        x = torch.addmm(x, functional.silu(gate) * up, layer["down"])
    return _norm(config, x, params["norm"], eps) @ params["head"]


def ours(config: Config, qkv: torch.Tensor, cache: Cache, batch: Batch) -> torch.Tensor:
    """The write and the attention with flashxla."""
    return fx.ragged_paged_attention_qkvpacked(
        qkv,
        cache,
        batch["context_lens"],
        batch["tables"],
        batch["starts"],
        batch["num_seqs"],
        config.dim**-0.5,
        layout="stacked",
        slot_mapping=batch["slots"],
        max_seqlen_q=1,
    )


def gather(config: Config, qkv: torch.Tensor, cache: Cache, batch: Batch) -> torch.Tensor:
    """The same in plain PyTorch: every key of a sequence is gathered, then softmax."""
    q_heads, kv_heads = config.heads
    q, k, v = qkv.split((q_heads, kv_heads, kv_heads), dim=1)
    block, offset = batch["slots"].long() // PAGE, batch["slots"].long() % PAGE
    for pages, new in zip(cache, (k, v), strict=True):
        pages[block, offset] = new
    keys, values = (
        pages[batch["tables"].long()].reshape(len(q), -1, *k.shape[1:]).float() for pages in cache
    )
    grouped = q.float().reshape(len(q), k.shape[1], -1, config.dim) * config.dim**-0.5
    scores = torch.einsum("shgd,skhd->shgk", grouped, keys)
    real = torch.arange(keys.shape[1], device=q.device) < batch["context_lens"][:, None]
    weights = scores.masked_fill(~real[:, None, None], -torch.inf).softmax(dim=-1)
    return torch.einsum("shgk,skhd->shgd", weights, values).reshape(q.shape).to(q.dtype)


def _norm(config: Config, x: torch.Tensor, weight: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    # Few operations, for each costs a lazy step its tracing: the mean square is the norm's square over the width.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = torch.rsqrt(torch.addcmul(eps, norm, norm, value=1 / config.hidden))
    return (x * scale).to(x.dtype) * weight


def _rotation(config: Config, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of each head's numbers, and of their partners half a head away. Values are not rotated."""
    even = torch.arange(0, config.dim, 2, dtype=torch.float32, device=positions.device)
    angles = positions[:, None, None].float() * config.theta ** (-even / config.dim)
    cos, sin = angles.cos(), angles.sin()
    own, partner = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
    q_heads, kv_heads = config.heads
    own, partner = (x.expand(-1, q_heads + kv_heads, -1) for x in (own, partner))
    kept = torch.ones_like(own[:, :kv_heads])
    return torch.cat([own, kept], dim=1), torch.cat([partner, 0 * kept], dim=1)


def _rotated(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    own, partner = rotation
    return torch.addcmul(x * own, x.roll(x.shape[-1] // 2, dims=-1), partner).to(x.dtype)
