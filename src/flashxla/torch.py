"""PyTorch front end: eager and torch.compile on cpu and cuda, lazy and openxla on XLA tensors.

Shapes: T query tokens (padded), S sequences (padded), Hq query heads, Hk KV heads, D head size, P blocks,
B block size, M blocks a sequence. Caches are updated in place on every device.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import Any

try:
    import torch
except ImportError as error:
    from flashxla import install

    raise ImportError(
        f"flashxla.torch needs PyTorch: {install.command('torch')}, or '.[torch-xla]' for PyTorch/XLA"
    ) from error

from flashxla import ops, setup_custom_call, torch_aliases, torch_calls, torch_library
from flashxla.ops import arguments
from flashxla.ops.op import Op

torch_library.register_all()
torch_aliases.register_all()


def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str = "auto",
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
    *,
    layout: str = "NHD",
) -> None:
    """Write new keys and values into a paged cache, in place.

    Args:
        key, value: [T', Hk, D], float32, float16 or bfloat16.
        key_cache, value_cache: [P, B, Hk, D] (layout "NHD") or [P, Hk, B, D] ("HND"); updated in place.
        slot_mapping: int32 or int64 [T], T <= T'. Token t goes to slot = block * B + offset; a slot < 0 is
            padding, a slot >= P * B is skipped (an error with FLASHXLA_CHECK=1).
        kv_cache_dtype: "auto" (the caches have key's dtype), "fp8" = "fp8_e4m3" or "fp8_e5m2": the caches are
            uint8 or that float8 type and hold x / scale, nearest even, saturating.
        k_scale, v_scale: float32, one element or [Hk]; None is 1. For fp8 caches only.
        layout: "NHD" or "HND".

    Raises:
        TypeError, ValueError: wrong dtypes or shapes.

    Semantics of vLLM's reshape_and_cache_flash.
    """
    _call(
        ops.RESHAPE_AND_CACHE_FLASH,
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        kv_cache_dtype,
        _scale(k_scale, key),
        _scale(v_scale, key),
        layout,
    )


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: str,
    kv_cache_dtype: str = "auto",
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
) -> None:
    """Write new keys and values into one tensor that holds both, in place.

    Args:
        key, value: [T', Hk, D], float32, float16 or bfloat16.
        kv_cache: by layout: "interleaved" [P, B, 2*Hk, D] (K at even heads), "packed_HND" [P, Hk, B, 2*D],
            "packed_NHD" [P, B, Hk, 2*D], "stacked" [2, P, B, Hk, D]; updated in place.
        slot_mapping, kv_cache_dtype, k_scale, v_scale: as for reshape_and_cache_flash.
        layout: how kv_cache holds K and V.

    Raises:
        TypeError, ValueError: wrong dtypes or shapes.
    """
    _call(
        ops.RESHAPE_AND_CACHE,
        key,
        value,
        kv_cache,
        slot_mapping,
        layout,
        kv_cache_dtype,
        _scale(k_scale, key),
        _scale(v_scale, key),
    )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | None = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    num_seqs: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    *,
    layout: str = "NHD",
    kv_cache_dtype: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention over a ragged batch, with dense or paged keys and values.

    Args:
        q: [T, Hq, D], float32, float16, bfloat16 or float8; D <= 256.
        k, v: dense [Tk, Hk, D], or with block_table paged [P, B, Hk, D] (layout "NHD") or [P, Hk, B, D] ("HND");
            q's dtype, a float8, or uint8 with kv_cache_dtype naming the format.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths, part of the compiled program.
        cu_seqlens_q: int32 [S+1], offsets of the sequences in q.
        cu_seqlens_k: int32 [S+1], offsets in dense k and v.
        seqused_k: int32 [S], lengths of the keys; needed with block_table, else overrides cu_seqlens_k's lengths.
        softmax_scale: None is 1 / sqrt(D).
        causal: mask aligned to the bottom right: query i sees keys up to i + len_k - len_q.
        window_size: (left, right) keys around that diagonal; -1 is unlimited.
        softcap: softcap * tanh(score / softcap) if > 0.
        alibi_slopes: float32 [Hq] or [S, Hq]; adds -slope * |i + len_k - len_q - j| after the softcap.
        block_table: int32 [S, M], the pages of each sequence.
        leftpad_k: int32 [S], how many first keys to mask; the alignment stays.
        s_aux: [Hq] attention sinks: exp(s_aux) joins the softmax's denominator.
        q_descale, k_descale, v_descale: float32, one element, [Hk] or [S, Hk]; factors of q, k and v.
        num_seqs: int32 [1]: only the first num_seqs sequences are real.
        return_softmax_lse: also return the log of the softmax's denominator.
        layout: of paged keys and values.
        kv_cache_dtype: "auto", "fp8" = "fp8_e4m3" or "fp8_e5m2".

    Returns:
        out [T, Hq, D] in q's dtype (bfloat16 for a float8 q); with return_softmax_lse also the natural-log LSE,
        float32 [Hq, T]. Tokens outside every sequence: out 0, LSE -inf.

    Raises:
        TypeError, ValueError: wrong dtypes or shapes.

    Semantics of flash-attention's flash_attn_varlen_func.
    """
    left, right = arguments.window_sides("flash_attn_varlen_func", window_size)
    out, lse = _call(
        ops.FLASH_ATTN_VARLEN,
        q,
        k,
        v,
        cu_seqlens_q,
        max_seqlen_q,
        max_seqlen_k,
        cu_seqlens_k,
        seqused_k,
        block_table,
        num_seqs,
        leftpad_k,
        alibi_slopes,
        s_aux,
        q_descale,
        k_descale,
        v_descale,
        softmax_scale,
        causal,
        left,
        right,
        softcap,
        return_softmax_lse,
        layout,
        kv_cache_dtype,
    )
    return (out, lse) if return_softmax_lse else out


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
    layout: str = "interleaved",
    *,
    kv_cache_dtype: str = "auto",
) -> torch.Tensor:
    """Ragged paged attention, causal: prefill, decode and mixed batches in one call.

    Args:
        query: [T, Hq, D]; D <= 256.
        kv_cache: one tensor by layout (see reshape_and_cache), or a (key_cache, value_cache) pair.
        context_lens: int32 [S], all keys of each sequence, the new tokens among them.
        block_tables: int32 [S, M], the pages of each sequence.
        query_start_loc: int32 [S+1], offsets of the sequences in query.
        num_seqs: int32 [1]: only the first num_seqs sequences are real.
        scale: factor of the scores, usually 1 / sqrt(D).
        sliding_window: a query sees this many last keys, itself among them; None is all.
        soft_cap: soft_cap * tanh(score / soft_cap).
        k_scale, v_scale: factors of K and V: a float, or float32 with one element or [Hk].
        layout: how kv_cache holds K and V. Of a pair "NHD" or "HND"; the default means "NHD" there.
        kv_cache_dtype: "auto", "fp8" = "fp8_e4m3" or "fp8_e5m2" (uint8 caches need it).

    Returns:
        [T, Hq, D] in query's dtype; padding tokens give 0.

    Raises:
        TypeError, ValueError: wrong dtypes or shapes.

    Semantics of ragged_paged_attention (PyTorch/XLA and JAX on TPUs).
    """
    first, second, layout = arguments.cache_tensors("paged_attention", kv_cache, layout)
    return _call(
        ops.PAGED_ATTENTION,
        query,
        first,
        context_lens,
        block_tables,
        query_start_loc,
        num_seqs,
        scale,
        sliding_window,
        soft_cap,
        _scale(k_scale, query),
        _scale(v_scale, query),
        second,
        layout,
        kv_cache_dtype,
    )


def merge_attn_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two attention results over disjoint sets of keys.

    Args:
        out_a, out_b: [T, Hq, D], one dtype.
        lse_a, lse_b: float32 [Hq, T]; -inf or +inf marks an empty part.

    Returns:
        (out [T, Hq, D], lse [Hq, T]) of the union of the keys.
    """
    return _call(ops.MERGE_ATTN_STATES, out_a, lse_a, out_b, lse_b)


def from_dlpack(external: Any) -> torch.Tensor:
    """An XLA tensor that shares the memory of another framework's tensor on the same device; nothing is copied.

    Args:
        external: an object with __dlpack__, such as a torch.cuda tensor or a JAX array; dense, row-major. On a GPU
            where PyTorch/XLA runs on one, else on the CPU. It must not change while XLA reads it.

    Returns:
        A tensor on torch_xla's device, whose buffer is external's memory and keeps it alive. On a GPU flashxla's
        in-place operations update that memory; on the CPU the first update gives the tensor new memory. Other
        operations make new tensors.

    Raises:
        TypeError, ValueError: no DLPack tensor, another device, strides, an address that XLA does not take, or a type
            that it has not.
        RuntimeError: in SPMD mode on the CPU.
    """
    from flashxla.xla import dlpack

    return dlpack.from_dlpack(external)


def to_dlpack(tensor: torch.Tensor) -> Any:
    """An XLA tensor for another framework's from_dlpack: torch.from_dlpack(fx.to_dlpack(x)); nothing is copied.

    Computes what is pending on the tensor's device, and waits for it. While the other framework holds the memory,
    update the tensor by flashxla's in-place operations only; it sees their updates after a sync.

    Raises:
        TypeError, ValueError: no XLA tensor, or a type that DLPack has no code for.
    """
    from flashxla.xla import dlpack

    return dlpack.to_dlpack(tensor)


def shard_map(
    function: Callable[..., Any],
    mesh: Any,
    in_specs: Sequence[tuple[Any, ...] | None],
    out_specs: Sequence[tuple[Any, ...] | None],
    updated: Sequence[int] = (),
) -> Callable[..., Any]:
    """A function that runs on each device's part of its arguments, in PyTorch/XLA's SPMD mode.

    XLA's partitioner cannot look into a custom call: left to itself it gathers what is sharded, the caches too.
    Heads do not depend on each other, so each device can run the operations on its own.

    Args:
        function: takes and returns tensors, of the size of one device's part.
        mesh: a torch_xla.distributed.spmd.Mesh with named axes.
        in_specs: for each argument the mesh axis of each dimension, (None, "heads", None), or None: replicated.
        out_specs: the same for each result.
        updated: the numbers of the arguments that function updates in place.

    Returns:
        A function of whole tensors, those sharded by mark_sharding with the same specs.

    As jax.shard_map, which serves flashxla.jax.
    """
    from flashxla.xla import spmd

    return spmd.shard_map(function, mesh, in_specs, out_specs, updated)


def _call(op: Op, *args: Any) -> Any:
    """Call torch.ops.flashxla.<op>. PyTorch's own messages about wrong types would name no function of ours."""
    return getattr(torch.ops.flashxla, op.name)(*torch_calls.checked(op, args))


def _scale(scale: torch.Tensor | float | None, like: torch.Tensor) -> Any:
    """A number as a tensor; anything else as it is, for `_call` to look at."""
    if isinstance(scale, numbers.Real) and isinstance(like, torch.Tensor):
        return torch.full((1,), float(scale), dtype=torch.float32, device=like.device)
    return scale


__all__ = [
    "flash_attn_varlen_func",
    "from_dlpack",
    "merge_attn_states",
    "paged_attention",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "setup_custom_call",
    "shard_map",
    "to_dlpack",
]
