"""Attention of a batch by PyTorch's FlexAttention: the masks and scores that PyTorch's other ways do not know."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from benchmarks import attention, heads_first
from benchmarks.batch import Batch
from benchmarks.compare import Prepared


def prepare(batch: Batch) -> Prepared:
    """Sequences that are alike. Compiled on a GPU; on a CPU, where nobody times it, PyTorch's plain form."""
    shape = batch.shape
    new, keys = shape.lens[0]
    slopes, softcap, window = batch.slopes, shape.softcap, shape.window

    def distance(q: Any, k: Any) -> Any:
        return q + (keys - new) - k

    def score(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        return score if slopes is None else score - slopes[h] * distance(q, k)

    def visible(b: Any, h: Any, q: Any, k: Any) -> Any:
        causal = distance(q, k) >= 0
        return causal if window is None else causal & (distance(q, k) < window)

    attend: Any = functools.partial(  # what it returns depends on its arguments
        flex_attention,
        score_mod=score if softcap or slopes is not None else None,
        block_mask=create_block_mask(visible, None, None, new, keys, device=batch.keys.device.type),
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor
        out, aux = attend(q, k, v)
        if batch.sinks is None:
            return out
        return out * torch.sigmoid(aux.lse - batch.sinks[:, None])[..., None].to(out.dtype)

    compiled = torch.compile(call, dynamic=False) if batch.keys.is_cuda else call
    calls = [functools.partial(compiled, *parts) for (parts,) in heads_first.inputs(batch)]
    return attention.prepared(batch, calls, ours=False, output=lambda out: heads_first.output([out]))
