"""JAX front end: eager, jit, scan, shard_map, vmap, export; on cpu and cuda.

The same operations and arguments as `flashxla.torch`, where each is described in full, but functional: an
operation that updates a cache returns the new cache. Where the caller donates the cache (`jax.jit` with
donate_argnums, or a loop's carry), the new one is the same buffer and nothing is copied.
"""

from __future__ import annotations

import numbers
from typing import Any

try:
    import jax
    import jax.export
    import jax.numpy as jnp
except ImportError as error:
    raise ImportError("flashxla.jax needs JAX: pip install jax") from error

from flashxla import jax_calls, native, ops, setup_custom_call
from flashxla.ops import arguments
from flashxla.ops.op import Aval, Op, Tensor, type_error
from flashxla.xla import registration


def reshape_and_cache_flash(
    key: jax.Array,
    value: jax.Array,
    key_cache: jax.Array,
    value_cache: jax.Array,
    slot_mapping: jax.Array,
    kv_cache_dtype: str = "auto",
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
    *,
    layout: str = "NHD",
) -> tuple[jax.Array, jax.Array]:
    """Write new keys [T', Hk, D] and values into a paged cache; returns (key_cache, value_cache).

    Caches are [P, B, Hk, D] (layout "NHD") or [P, Hk, B, D] ("HND"). Token t < T goes to
    slot_mapping[t] = block * B + offset; a slot < 0 is padding. See flashxla.torch.reshape_and_cache_flash.
    """
    key_cache, value_cache = _call(
        ops.RESHAPE_AND_CACHE_FLASH,
        key=key,
        value=value,
        key_cache=key_cache,
        value_cache=value_cache,
        slot_mapping=slot_mapping,
        kv_cache_dtype=kv_cache_dtype,
        k_scale=_scale(k_scale),
        v_scale=_scale(v_scale),
        layout=layout,
    )
    return key_cache, value_cache


def reshape_and_cache(
    key: jax.Array,
    value: jax.Array,
    kv_cache: jax.Array,
    slot_mapping: jax.Array,
    layout: str,
    kv_cache_dtype: str = "auto",
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
) -> jax.Array:
    """Write new keys [T', Hk, D] and values into one tensor that holds both; returns the new kv_cache.

    Layouts: "interleaved" [P, B, 2*Hk, D], "packed_HND" [P, Hk, B, 2*D], "packed_NHD" [P, B, Hk, 2*D],
    "stacked" [2, P, B, Hk, D]. See flashxla.torch.reshape_and_cache.
    """
    (kv_cache,) = _call(
        ops.RESHAPE_AND_CACHE,
        key=key,
        value=value,
        kv_cache=kv_cache,
        slot_mapping=slot_mapping,
        layout=layout,
        kv_cache_dtype=kv_cache_dtype,
        k_scale=_scale(k_scale),
        v_scale=_scale(v_scale),
    )
    return kv_cache


def flash_attn_varlen_func(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    max_seqlen_q: int,
    cu_seqlens_q: jax.Array,
    max_seqlen_k: int,
    cu_seqlens_k: jax.Array | None = None,
    seqused_k: jax.Array | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | None = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: jax.Array | None = None,
    block_table: jax.Array | None = None,
    leftpad_k: jax.Array | None = None,
    s_aux: jax.Array | None = None,
    q_descale: jax.Array | None = None,
    k_descale: jax.Array | None = None,
    v_descale: jax.Array | None = None,
    num_seqs: jax.Array | None = None,
    return_softmax_lse: bool = False,
    *,
    layout: str = "NHD",
    kv_cache_dtype: str = "auto",
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Softmax attention over a ragged batch; returns out [T, Hq, D], or (out, lse [Hq, T]).

    q [T, Hq, D]; dense k, v [Tk, Hk, D] with cu_seqlens_k int32 [S+1], or paged caches with block_table int32
    [S, M] and seqused_k int32 [S]. See flashxla.torch.flash_attn_varlen_func.
    """
    left, right = arguments.window_sides("flash_attn_varlen_func", window_size)
    results = _call(
        ops.FLASH_ATTN_VARLEN,
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k,
        block_table=block_table,
        num_seqs=num_seqs,
        leftpad_k=leftpad_k,
        alibi_slopes=alibi_slopes,
        s_aux=s_aux,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        softmax_scale=softmax_scale,
        causal=causal,
        window_left=left,
        window_right=right,
        softcap=softcap,
        return_softmax_lse=return_softmax_lse,
        layout=layout,
        kv_cache_dtype=kv_cache_dtype,
    )
    return (results[0], results[1]) if return_softmax_lse else results[0]


def paged_attention(
    query: jax.Array,
    kv_cache: jax.Array | tuple[jax.Array, jax.Array],
    context_lens: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    num_seqs: jax.Array,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
    layout: str = "interleaved",
    *,
    kv_cache_dtype: str = "auto",
) -> jax.Array:
    """Ragged paged attention, causal: prefill, decode and mixed batches in one call; returns [T, Hq, D].

    query [T, Hq, D]; kv_cache one tensor by layout or a (key_cache, value_cache) pair; context_lens int32 [S]
    counts all keys; block_tables int32 [S, M]. See flashxla.torch.paged_attention.
    """
    first, second, layout = arguments.cache_tensors("paged_attention", kv_cache, layout)
    (out,) = _call(
        ops.PAGED_ATTENTION,
        query=query,
        kv_cache=first,
        context_lens=context_lens,
        block_tables=block_tables,
        query_start_loc=query_start_loc,
        num_seqs=num_seqs,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        k_scale=_scale(k_scale),
        v_scale=_scale(v_scale),
        value_cache=second,
        layout=layout,
        kv_cache_dtype=kv_cache_dtype,
    )
    return out


def merge_attn_states(
    out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Merge two attention results over disjoint sets of keys; returns (out [T, Hq, D], lse [Hq, T]).

    An LSE of -inf or +inf marks an empty part. See flashxla.torch.merge_attn_states.
    """
    out, lse = _call(ops.MERGE_ATTN_STATES, out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    return out, lse


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What jax.export must be told to take flashxla's custom calls: its argument `disabled_checks`.

    jax.export promises stability for the custom calls that it knows alone. An exported program calls libraries of
    flashxla, so whoever loads it calls flashxla.setup_custom_call() first.
    """
    targets = {n.target for natives in (native.NATIVES, *native.MORE_NATIVES.values()) for n in natives}
    return [jax.export.DisabledSafetyCheck.custom_call(target) for target in sorted(targets)]


def _call(op: Op, **values: Any) -> list[jax.Array]:
    registration.register_jax()
    tensors = {t.name: _array(op, t, values) for t in op.tensors}
    avals = {name: None if x is None else Aval(x.shape, str(x.dtype)) for name, x in tensors.items()}
    call = op.resolve(avals, {s.name: values[s.name] for s in op.scalars})
    return jax_calls.custom_call(call, [jnp.asarray(tensors[name]) for name, _ in call.operands])


def _array(op: Op, tensor: Tensor, values: dict[str, Any]) -> jax.Array | None:
    x = values[tensor.name]
    try:
        return None if x is None else jnp.asarray(x)
    except TypeError as error:
        label = op.label(tensor.name, lambda name: values[name] is not None)
        got = f"{x!r} ({type(x).__name__})"
        raise type_error(op.function, label, got, f"an array of {', '.join(tensor.dtypes)}") from error


def _scale(scale: jax.Array | float | None) -> Any:
    return jnp.full((1,), float(scale), jnp.float32) if isinstance(scale, numbers.Real) else scale


__all__ = [
    "export_checks",
    "flash_attn_varlen_func",
    "merge_attn_states",
    "paged_attention",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "setup_custom_call",
]
