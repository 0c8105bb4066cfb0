"""The gradients of flash_attn_varlen_func: float64, by PyTorch's autograd through the textbook's formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests import reference
from tests.batches import Arguments

Array = np.ndarray
SOURCES = ("q", "k", "v", "s_aux")


def cotangents(rng: np.random.Generator, arguments: Arguments) -> tuple[np.ndarray, ...]:
    """Gradients of out and, where it is returned, of the LSE; NaN for tokens outside every sequence."""
    q = arguments["q"]
    tokens, heads = q.shape[:2]
    grads = [rng.standard_normal((tokens, heads, arguments["v"].shape[-1]), np.float32).astype(q.dtype)]
    if arguments["return_softmax_lse"]:
        grads.append(rng.standard_normal((heads, tokens), np.float32))
    outside = np.isnan(q[:, 0, 0].astype(np.float32))
    grads[0][outside] = np.nan
    for grad in grads[1:]:
        grad[:, outside] = np.nan
    return tuple(grads)


def gradients_from(
    arguments: dict[str, Any], out: Array, grad_out: Array, grad_lse: Array | None = None
) -> dict[str, Array]:
    """The gradients that follow from an out that was rounded, as csrc/include/flashxla/attention_backward.h has it.

    The rounding of a row's out acts on the gradients as a gradient of its LSE would.
    """
    exact, _ = reference.flash_attn_varlen_func(**arguments)
    rounding = (grad_out.astype(np.float64) * (out.astype(np.float64) - exact)).sum(-1).T
    return flash_attn_varlen_gradients(
        arguments, grad_out, -rounding if grad_lse is None else grad_lse - rounding
    )


def flash_attn_varlen_gradients(
    arguments: dict[str, Any], grad_out: Array, grad_lse: Array | None = None
) -> dict[str, Array]:
    """Of q, k, v and, if given, s_aux: of sum(grad_out * out) + sum(grad_lse * lse), where a row has an LSE."""
    given = {name: arguments[name] for name in SOURCES if arguments.get(name) is not None}
    leaves = {name: _leaf(array) for name, array in given.items()}
    total = torch.zeros((), dtype=torch.float64)
    keys_of = reference.dense_keys(
        arguments["k"], arguments["v"], arguments["cu_seqlens_k"], arguments.get("seqused_k")
    )
    ranges = reference.query_ranges(arguments["cu_seqlens_q"], len(arguments["q"]), arguments.get("num_seqs"))
    for s, query_range in enumerate(ranges):
        keys = keys_of(s) if query_range else None
        if not query_range or keys is None:
            continue
        length, positions = keys[:2]
        leftpad = arguments.get("leftpad_k")
        positions = positions[positions >= (0 if leftpad is None else leftpad[s])]
        rows = slice(*query_range)
        out, lse, real = _sequence(leaves, arguments, s, rows, length, positions)
        total = total + (out * _rows(grad_out[rows]) * real.T[:, :, None]).sum()
        if grad_lse is not None:
            total = total + torch.where(real, lse * _rows(grad_lse[:, rows]), 0.0).sum()
    if total.requires_grad:
        total.backward()
    return {name: (torch.zeros_like(x) if x.grad is None else x.grad).numpy() for name, x in leaves.items()}


def _leaf(array: Array) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.float64)).requires_grad_()


def _rows(array: Array) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.float64))


def _sequence(
    leaves: dict[str, torch.Tensor],
    arguments: dict[str, Any],
    s: int,
    rows: slice,
    length: int,
    positions: Array,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out [n, Hq, Dv], the LSE [Hq, n], and which rows see a key or a sink [Hq, n]."""
    q = leaves["q"][rows].transpose(0, 1)
    num_heads, num_queries, dim = q.shape
    group = num_heads // leaves["k"].shape[1]
    at = torch.from_numpy(int(arguments["cu_seqlens_k"][s]) + positions)
    k, v = (leaves[name][at].transpose(0, 1).repeat_interleave(group, 0) for name in "kv")
    scale = arguments.get("softmax_scale")
    scores = q @ k.transpose(1, 2) * (dim**-0.5 if scale is None else scale)
    if softcap := arguments.get("softcap", 0.0):
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(num_queries)[:, None] + (length - num_queries) - torch.from_numpy(positions)
    if arguments.get("alibi_slopes") is not None:
        slopes = torch.from_numpy(arguments["alibi_slopes"]).double()
        slopes = slopes[s] if slopes.ndim == 2 else slopes
        scores = scores - slopes[:, None, None] * distance.abs()
    left, right = arguments.get("window_size", (-1, -1))
    right = 0 if arguments.get("causal") else right
    seen = torch.ones_like(distance, dtype=torch.bool)
    seen &= (distance <= left) if left >= 0 else seen
    seen &= (-distance <= right) if right >= 0 else seen
    scores = torch.where(seen, scores, -torch.inf)
    sinks = leaves.get("s_aux")
    columns = [scores]
    if sinks is not None:
        columns.append(sinks[:, None, None].expand(num_heads, num_queries, 1))
    real = seen.any(1).expand(num_heads, -1) if sinks is None else torch.ones(num_heads, num_queries).bool()
    # A row without anything to see would be infinity minus infinity.
    columns.append(torch.where(real, -torch.inf, 0.0)[:, :, None])
    lse = torch.logsumexp(torch.cat(columns, 2), 2)
    out = torch.exp(scores - lse[:, :, None]) @ v
    return out.transpose(0, 1), lse, real
