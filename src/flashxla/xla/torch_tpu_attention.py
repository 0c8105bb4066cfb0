"""torch.nn.functional.scaled_dot_product_attention on TorchTPU's tensors, off TPUs.

Of its implementations TorchTPU prefers a kernel for TPUs, which stands in the place of cuDNN's. Here flash_attn_varlen
and its backward compute what they can express, and matrix products the rest: masks and dropout.
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any, NamedTuple

import torch

from flashxla.ops.attention import MAX_HEAD_SIZE, MAX_VALUE_HEAD_SIZE
from flashxla.ops.parameters import FLOATS
from flashxla.xla.torch_tpu import TORCH_KEY

# What TorchTPU writes where a mask of booleans is false.
_MASKED = torch.finfo(torch.float16).min
_KERNEL = "_scaled_dot_product_cudnn_attention"


@functools.cache
def install() -> torch.library.Library:
    """Take the place of that kernel. The library that is returned keeps it."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings(action="ignore"):  # that another kernel was there
        library.impl(_KERNEL, _forward, TORCH_KEY, allow_override=True)
        library.impl(f"{_KERNEL}_backward", _backward, TORCH_KEY, allow_override=True)
    return library


class _Scores(NamedTuple):
    """What the softmax is taken of, float32 [B, Hq, Sq, Sk], and the keys and values of each head of the queries."""

    scores: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    seed = torch.zeros((), dtype=torch.int64, device=query.device)
    if _is_expressible(query, key, value, attn_bias, dropout_p, is_causal):
        out, lse = _flash(query, key, value, is_causal, scale)
    else:
        if dropout_p:
            seed = torch.randint(2**31, (), dtype=torch.int64, device=query.device)
        scores, _, values = _scores(query, key, value, attn_bias, is_causal, scale)
        lse = torch.logsumexp(scores, -1)
        weights = _weights(scores, lse) * _kept(scores.shape, dropout_p, seed)
        out = _laid_out_like(query, (weights @ values).to(query.dtype))
    lengths = query.shape[2], key.shape[2]
    return out, lse[..., None], None, None, *lengths, seed, torch.zeros_like(seed), None


def _backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    attn_bias: torch.Tensor | None,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    if _is_expressible(query, key, value, attn_bias, dropout_p, is_causal):
        return _flash_backward(grad_out, query, key, value, out, logsumexp[..., 0], is_causal, scale)
    scores, keys, values = _scores(query, key, value, attn_bias, is_causal, scale)
    scale = _scale(query, scale)
    grad = grad_out.float()
    weights, kept = _weights(scores, logsumexp[..., 0]), _kept(scores.shape, dropout_p, philox_seed)
    delta = (grad * out.float()).sum(-1, keepdim=True)
    grad_scores = weights * ((grad @ values.mT) * kept - delta)
    grad_query = scale * (grad_scores @ keys)
    grad_key = _of_group(scale * (grad_scores.mT @ query.float()), key)
    grad_value = _of_group((weights * kept).mT @ grad, value)
    return grad_query.to(query.dtype), grad_key, grad_value


def _is_expressible(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
) -> bool:
    """Whether flash_attn_varlen has a call for it."""
    return (
        bias is None
        and dropout_p == 0
        and query.dim() == 4
        and min(*query.shape, *key.shape, *value.shape) > 0
        and not (is_causal and query.shape[2] > key.shape[2])
        and query.shape[1] % key.shape[1] == 0
        and query.shape[3] <= MAX_HEAD_SIZE
        and value.shape[3] <= MAX_VALUE_HEAD_SIZE
        and str(query.dtype).removeprefix("torch.") in FLOATS
    )


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    from flashxla.torch import flash_attn_varlen_func

    out, lse = flash_attn_varlen_func(
        **_packed_call(query, key, value, is_causal, scale), return_softmax_lse=True
    )
    lse = lse.unflatten(1, (query.shape[0], -1)).transpose(0, 1).contiguous()
    return _unpacked_like(query, out), lse


def _flash_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, ...]:
    from flashxla import torch as _torch_front_end  # noqa: F401  (defines torch.ops.flashxla)

    grads = torch.ops.flashxla.flash_attn_varlen_backward(
        **_packed_call(query, key, value, is_causal, scale),
        grad_out=_packed(grad_out),
        out=_packed(out),
        softmax_lse=lse.transpose(0, 1).flatten(1),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return tuple(_unpacked_like(x, grad) for x, grad in zip((query, key, value), grads, strict=False))


def _packed_call(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float | None
) -> dict[str, Any]:
    """The arguments that flash_attn_varlen and its backward share."""
    batch, _, len_q, _ = query.shape
    len_k = key.shape[2]
    offsets = torch.arange(batch + 1, dtype=torch.int32, device=query.device)
    # PyTorch aligns the mask to the top left: keys beyond the last query are masked for all.
    used = len_q if is_causal else len_k
    return {
        "q": _packed(query),
        "k": _packed(key),
        "v": _packed(value),
        "max_seqlen_q": len_q,
        "cu_seqlens_q": offsets * len_q,
        "max_seqlen_k": used,
        "cu_seqlens_k": offsets * len_k,
        "seqused_k": torch.full_like(offsets[1:], used) if used < len_k else None,
        "softmax_scale": _scale(query, scale),
        "causal": is_causal,
    }


def _packed(x: torch.Tensor) -> torch.Tensor:
    """[B, H, S, D] as [B * S, H, D]."""
    return x.transpose(1, 2).flatten(0, 1)


def _unpacked_like(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """[B * S, H, D] as [B, H, S, D], laid out like x."""
    return _laid_out_like(x, packed.unflatten(0, (x.shape[0], -1)).transpose(1, 2))


def _laid_out_like(x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """With the strides' order that PyTorch expects, and that a compiled backward graph takes for granted."""
    order = sorted(range(4), key=x.stride, reverse=True)
    return result.permute(order).contiguous().permute([order.index(i) for i in range(4)])


def _scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> _Scores:
    keys, values = (x.float().repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = _scale(query, scale) * (query.float() @ keys.mT)
    if bias is not None:
        scores = scores + bias.float().masked_fill(bias == _MASKED, -math.inf)
    if is_causal:
        rows, columns = (torch.arange(n, device=query.device) for n in scores.shape[-2:])
        scores = scores.masked_fill(columns > rows[:, None], -math.inf)
    return _Scores(scores, keys, values)


def _weights(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """The softmax; rows that see nothing have no weights."""
    return torch.exp(scores - lse.masked_fill(lse == -math.inf, math.inf)[..., None])


def _kept(shape: torch.Size, dropout_p: float, seed: torch.Tensor) -> torch.Tensor | float:
    """What each weight is multiplied by, the same at each call with a seed: 0, or 1 / (1 - dropout_p).

    The random bits are a hash (lowbias32) of the seed and the weight's place.
    """
    if not dropout_p:
        return 1.0
    x = torch.arange(math.prod(shape), device=seed.device) + seed * 0x9E3779B1
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = x & 0xFFFFFFFF
        x = (x ^ (x >> shift)) * factor
    kept = (x & 0xFFFFFFFF) >= int(dropout_p * 2**32)
    return (
        kept.view(shape).float() / (1 - dropout_p) if dropout_p < 1 else torch.zeros((), device=seed.device)
    )


def _scale(query: torch.Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _of_group(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The sum over the queries' heads that share a head of x."""
    return grad.unflatten(1, (x.shape[1], -1)).sum(2).to(x.dtype)
