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
from flashxla.ops.messages import value_error

FOLDER = Path(__file__).parent

flash_attn_func = fx.flash_attn_func
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
    batch_invariant: bool = False,
) -> Any:
    """flash-attention's function of that name: `flashxla.torch.flash_attn_varlen_func` in another order of arguments.

    Args:
        q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            s_aux, batch_invariant: as there.
        max_seqlen_q, max_seqlen_k: numbers, or tensors of one.
        dropout_p: 0.0; attention here has no dropout.
        return_attn_probs: also return the LSE and None.
        block_table: int32 [S, M]; the lengths of the pages' keys are those of cu_seqlens_k then.

    Returns:
        out [T, Hq, Dv], or (out, LSE float32 [Hq, T], None).

    Raises:
        TypeError, ValueError: wrong dtypes, shapes or values.
    """
    if dropout_p:
        raise value_error(
            "flash_attn_varlen_func", "dropout_p", dropout_p, "0.0: attention here has no dropout"
        )
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
        batch_invariant=batch_invariant,
        return_softmax_lse=return_attn_probs,
    )
    return (*results, None) if return_attn_probs else results


__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
