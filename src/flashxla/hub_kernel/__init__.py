"""A kernel as the package `kernels` and transformers load it: a folder with this file and metadata.json.

    LOCAL_KERNELS="flashxla/attention=$(python -m flashxla.hub_kernel)"

The functions are flash-attention's, in its order of arguments, for PyTorch. They serve tools that take nothing but
kernels of the hub; in a program of one's own `flashxla.transformers.enable()` does more. See docs/transformers.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import flashxla.torch as fx
from flashxla.ops.messages import in_words_of, value_error

FOLDER = Path(__file__).parent

flash_attn_with_kvcache = fx.flash_attn_with_kvcache


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | None = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    s_aux: torch.Tensor | None = None,
) -> Any:
    """flash-attention's function of that name: `flashxla.torch.flash_attn_varlen_func` in another order of arguments.

    Args:
        q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            s_aux: as there.
        max_seqlen_q, max_seqlen_k: numbers, or tensors of one.
        dropout_p: 0.0; attention here has no dropout.
        return_attn_probs: also return the LSE and None.
        block_table: int32 [S, M]; the lengths of the pages' keys are those of cu_seqlens_k then.

    Returns:
        out [T, Hq, Dv], or (out, LSE float32 [Hq, T], None).

    Raises:
        TypeError, ValueError: wrong dtypes, shapes or values.
    """
    _check_dropout("flash_attn_varlen_func", dropout_p)
    keys: dict[str, Any] = (
        {"cu_seqlens_k": cu_seqlens_k}
        if block_table is None
        else {"seqused_k": cu_seqlens_k.diff(), "block_table": block_table}
    )
    results = fx.flash_attn_varlen_func(
        q,
        k,
        v,
        max_seqlen_q=int(max_seqlen_q),
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_k=int(max_seqlen_k),
        **keys,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap or 0.0,
        alibi_slopes=alibi_slopes,
        s_aux=s_aux,
        deterministic=deterministic,
        return_softmax_lse=return_attn_probs,
    )
    return (*results, None) if return_attn_probs else results


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | None = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: torch.Tensor | None = None,
) -> Any:
    """flash-attention's function of that name, with attention sinks beside.

    Args:
        q: [B, Sq, Hq, D].
        k, v: [B, Sk, Hk, D] and [B, Sk, Hk, Dv].
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, s_aux:
            as in `flash_attn_varlen_func`.

    Returns:
        out [B, Sq, Hq, Dv], or (out, LSE float32 [B, Hq, Sq], None).

    Raises:
        TypeError, ValueError: wrong dtypes, shapes or values.
    """
    function = "flash_attn_func"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise value_error(
                function, name, f"shape {list(tensor.shape)}", "[batch, tokens, heads, head size]"
            )
    _check_dropout(function, dropout_p)
    batch, len_q, len_k = q.shape[0], q.shape[1], k.shape[1]
    offsets = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    try:
        results = flash_attn_varlen_func(
            q.flatten(0, 1),
            k.flatten(0, 1),
            v.flatten(0, 1),
            offsets * len_q,
            offsets * len_k,
            len_q,
            len_k,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            deterministic=deterministic,
            return_attn_probs=return_attn_probs,
            s_aux=s_aux,
        )
    except (TypeError, ValueError) as error:
        raise in_words_of(error, function, {}) from error
    if not return_attn_probs:
        return results.unflatten(0, (batch, len_q))
    out, lse, _ = results
    return out.unflatten(0, (batch, len_q)), lse.unflatten(1, (batch, len_q)).transpose(0, 1), None


def _check_dropout(function: str, dropout_p: float) -> None:
    if dropout_p:
        raise value_error(function, "dropout_p", dropout_p, "0.0: attention here has no dropout")


__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
