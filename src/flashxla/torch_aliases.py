"""The operations under the names that earlier systems gave them.

They decompose into torch.ops.flashxla's ops on every device, so their fake kernels and compilation are those.
"""

from __future__ import annotations

from typing import Any

import torch

_XLA = torch.library.Library("xla", "FRAGMENT")
_XLA_GPU = torch.library.Library("xla_gpu", "FRAGMENT")
_FLASHXLA = torch.library.Library("flashxla", "FRAGMENT")
_PAGED_ATTENTION = (
    "paged_attention(Tensor query, Tensor kv_cache, Tensor context_lens, Tensor block_tables, "
    "Tensor query_start_loc, Tensor num_seqs, float scale, SymInt? sliding_window=None, float? soft_cap=None, "
    "Tensor? k_scale=None, Tensor? v_scale=None{more}) -> Tensor"
)


def register_all() -> None:
    """Register the aliases."""
    _XLA.define(
        "flash_attn_varlen_op(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor? cu_seqlens_k, "
        "SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, bool is_causal=False, SymInt window_left=-1, "
        "SymInt window_right=-1, float softcap=0.0, Tensor? seqused_k=None, Tensor? block_table=None) "
        "-> (Tensor, Tensor)"
    )
    _XLA.impl("flash_attn_varlen_op", _flash_attn_varlen_op, "CompositeImplicitAutograd")
    _XLA_GPU.define(_PAGED_ATTENTION.format(more=""))
    _XLA_GPU.impl("paged_attention", _paged_attention, "CompositeImplicitAutograd")
    more = ', Tensor? value_cache=None, str layout="interleaved", str kv_cache_dtype="auto"'
    _FLASHXLA.define(_PAGED_ATTENTION.format(more=more))
    _FLASHXLA.impl("paged_attention", _paged_attention, "CompositeImplicitAutograd")


def _flash_attn_varlen_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    is_causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ops.flashxla.flash_attn_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        max_seqlen_q,
        max_seqlen_k,
        # Callers pass a dummy where the keys are paged.
        cu_seqlens_k=cu_seqlens_k if block_table is None else None,
        seqused_k=seqused_k,
        block_table=block_table,
        softmax_scale=softmax_scale,
        causal=is_causal,
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
        return_softmax_lse=True,
    )


def _paged_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """The output alone."""
    return torch.ops.flashxla.paged_attention_with_lse(*args, **kwargs)[0]
