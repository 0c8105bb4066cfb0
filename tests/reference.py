"""What every operation computes: float64 numpy, written from the public contract and from nothing else.

The functions have the names and arguments of the public ones, take numpy arrays (with ml_dtypes for bfloat16
and float8) and return float64 results that nothing has rounded. In-place operations return the new caches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray
Window = tuple[int, int]

FP8_FORMATS = {
    "fp8": ml_dtypes.float8_e4m3fn,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}


def kv_views(layout: str, first: Array, second: Array | None = None) -> tuple[Array, Array]:
    """Keys and values of a cache as writable views [P, B, Hk, D]."""
    if layout == "NHD":
        assert second is not None
        return first, second
    if layout == "HND":
        assert second is not None
        return first.transpose(0, 2, 1, 3), second.transpose(0, 2, 1, 3)
    if layout == "interleaved":
        return first[:, :, 0::2], first[:, :, 1::2]
    if layout == "stacked":
        return first[0], first[1]
    assert layout in ("packed_HND", "packed_NHD"), layout
    nhd = first.transpose(0, 2, 1, 3) if layout == "packed_HND" else first
    half = nhd.shape[-1] // 2
    return nhd[..., :half], nhd[..., half:]


def quantize(x: Array, scale: Array, dtype: Any) -> Array:
    """x / scale in `dtype`: float32 division, nearest even, saturating (ml_dtypes alone overflows to NaN)."""
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    with np.errstate(all="ignore"):
        quotient = x.astype(np.float32) / np.asarray(scale, np.float32)
    return np.clip(quotient, -largest, largest).astype(dtype)


def decode(cache: Array, kv_cache_dtype: str) -> Array:
    """The values of a cache's elements."""
    if cache.dtype == np.uint8:
        cache = cache.view(FP8_FORMATS[kv_cache_dtype])
    return cache.astype(np.float64)


def _write(
    key: Array, view: Array, slot_mapping: Array, kv_cache_dtype: str, scale: Array | float | None
) -> None:
    num_blocks, block_size, num_heads, _ = view.shape
    if kv_cache_dtype != "auto" and key.dtype != FP8_FORMATS[kv_cache_dtype]:
        scales = np.broadcast_to(np.float32(1) if scale is None else scale, (num_heads,))
        key = quantize(key, scales[:, None], FP8_FORMATS[kv_cache_dtype])
    if view.dtype == np.uint8:
        key = key.view(np.uint8)
    for token, slot in enumerate(slot_mapping.tolist()):
        if 0 <= slot < num_blocks * block_size:
            view[slot // block_size, slot % block_size] = key[token]


def reshape_and_cache_flash(
    key: Array,
    value: Array,
    key_cache: Array,
    value_cache: Array,
    slot_mapping: Array,
    kv_cache_dtype: str = "auto",
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    layout: str = "NHD",
) -> tuple[Array, Array]:
    key_cache, value_cache = key_cache.copy(), value_cache.copy()
    k, v = kv_views(layout, key_cache, value_cache)
    _write(key, k, slot_mapping, kv_cache_dtype, k_scale)
    _write(value, v, slot_mapping, kv_cache_dtype, v_scale)
    return key_cache, value_cache


def reshape_and_cache(
    key: Array,
    value: Array,
    kv_cache: Array,
    slot_mapping: Array,
    layout: str,
    kv_cache_dtype: str = "auto",
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
) -> Array:
    kv_cache = kv_cache.copy()
    k, v = kv_views(layout, kv_cache)
    _write(key, k, slot_mapping, kv_cache_dtype, k_scale)
    _write(value, v, slot_mapping, kv_cache_dtype, v_scale)
    return kv_cache


def _attend_head(
    q: Array,
    k: Array,
    v: Array,
    distance: Array,
    seen: Array,
    scale: float,
    softcap: float,
    slope: float,
    sink: float | None,
) -> tuple[Array, Array]:
    """One head of one sequence: q [n, D], k and v [m, D], distance and seen [n, m]."""
    with np.errstate(all="ignore"):
        scores = scale * (q @ k.T)
        if softcap > 0:
            scores = softcap * np.tanh(scores / softcap)
        if slope:
            scores -= slope * np.abs(distance)
        scores = np.where(seen, scores, -np.inf)
        top = scores.max(axis=1, initial=-np.inf if sink is None else sink, keepdims=True)
        top = np.where(top == -np.inf, 0.0, top)
        weights = np.exp(scores - top)
        total = weights.sum(axis=1, keepdims=True) + (0.0 if sink is None else np.exp(sink - top))
        out = weights @ np.nan_to_num(v) / np.where(total == 0, 1.0, total)
        lse = np.log(total[:, 0]) + top[:, 0]
    if not np.isfinite(v).all():  # a value that is no number reaches the rows that see its key, and no other
        out[(seen.astype(np.float64) @ ~np.isfinite(v)) > 0] = np.nan
    return out, lse


def _attention(
    q: Array,
    query_ranges: Sequence[tuple[int, int] | None],
    keys_of: Callable[[int], tuple[int, Array, Array, Array] | None],
    *,
    num_kv_heads: int,
    value_dim: int,
    softmax_scale: float,
    causal: bool,
    window: Window,
    softcap: float,
    alibi_slopes: Array | None,
    sinks: Array | None,
    leftpad: Array | None,
    q_descale: Array | float | None,
    k_descale: Array | float | None,
    v_descale: Array | float | None,
    num_sequences: int,
) -> tuple[Array, Array]:
    """keys_of(s): the length of sequence s, and of the keys that exist their positions, keys and values."""
    num_tokens, num_heads, _ = q.shape
    out = np.zeros((num_tokens, num_heads, value_dim))
    lse = np.full((num_heads, num_tokens), -np.inf)
    queries = q.astype(np.float64)

    def per_head(scale: Array | float | None) -> Array:
        return np.broadcast_to(1.0 if scale is None else np.float64(scale), (num_sequences, num_kv_heads))

    qk_scale = softmax_scale * per_head(q_descale) * per_head(k_descale)
    v_scale = per_head(v_descale)
    slopes = np.broadcast_to(0.0 if alibi_slopes is None else alibi_slopes, (num_sequences, num_heads))
    left, right = window[0], 0 if causal else window[1]
    for s, query_range in enumerate(query_ranges):
        keys = keys_of(s) if query_range else None
        if not query_range or keys is None:
            continue
        start, end = query_range
        len_k, positions, k, v = keys
        i = np.arange(end - start, dtype=np.int64)[:, None]
        distance = i + len_k - (end - start) - positions
        seen = np.broadcast_to(positions >= (0 if leftpad is None else leftpad[s]), distance.shape)
        if left >= 0:
            seen = seen & (distance <= left)
        if right >= 0:
            seen = seen & (-distance <= right)
        for h in range(num_heads):
            kv_head = h // (num_heads // num_kv_heads)
            head_out, lse[h, start:end] = _attend_head(
                queries[start:end, h],
                k[:, kv_head],
                v[:, kv_head],
                distance,
                seen,
                qk_scale[s, kv_head],
                softcap,
                slopes[s, h],
                None if sinks is None else float(sinks[h]),
            )
            out[start:end, h] = head_out * v_scale[s, kv_head]
    return out, lse


def query_ranges(
    cu_seqlens_q: Array, num_tokens: int, num_seqs: Array | None
) -> list[tuple[int, int] | None]:
    offsets = cu_seqlens_q.tolist()
    count = len(offsets) - 1
    if num_seqs is not None:
        count = min(max(int(np.ravel(num_seqs)[0]), 0), count)
    ranges: list[tuple[int, int] | None] = []
    used = 0
    for start, end in itertools.pairwise(offsets[: count + 1]):
        valid = used <= start <= end <= num_tokens
        ranges.append((start, end) if valid else None)
        used = end if valid else used
    return ranges


def _paged_keys(
    k: Array, v: Array, block_table: Array, lengths: Array
) -> Callable[[int], tuple[int, Array, Array, Array] | None]:
    """Of caches [P, B, Hk, D]."""
    num_blocks, block_size = k.shape[:2]

    def keys_of(s: int) -> tuple[int, Array, Array, Array] | None:
        len_k = int(lengths[s])
        if len_k < 0:
            return None
        where = [
            (page * block_size + offset, block, offset)
            for page, block in enumerate(block_table[s].tolist())
            if 0 <= block < num_blocks
            for offset in range(min(block_size, max(len_k - page * block_size, 0)))
        ]
        position, block, offset = np.array(where, np.int64).reshape(-1, 3).T
        return len_k, position, k[block, offset], v[block, offset]

    return keys_of


def dense_keys(
    k: Array, v: Array, cu_seqlens_k: Array, lengths: Array | None
) -> Callable[[int], tuple[int, Array, Array, Array] | None]:
    def keys_of(s: int) -> tuple[int, Array, Array, Array] | None:
        start, end = int(cu_seqlens_k[s]), int(cu_seqlens_k[s + 1])
        len_k = end - start if lengths is None else int(lengths[s])
        if not 0 <= start <= end <= len(k) or len_k < 0:
            return None
        there = slice(start, min(start + len_k, len(k)))
        return len_k, np.arange(there.stop - start, dtype=np.int64), k[there], v[there]

    return keys_of


def flash_attn_varlen_func(
    q: Array,
    k: Array,
    v: Array,
    max_seqlen_q: int,
    cu_seqlens_q: Array,
    max_seqlen_k: int,
    cu_seqlens_k: Array | None = None,
    seqused_k: Array | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    block_table: Array | None = None,
    leftpad_k: Array | None = None,
    s_aux: Array | None = None,
    q_descale: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    num_seqs: Array | None = None,
    return_softmax_lse: bool = False,
    layout: str = "NHD",
    kv_cache_dtype: str = "auto",
    deterministic: bool = False,  # of the gradients
    batch_invariant: bool = False,  # of the bits
    positive_values: bool = False,
) -> tuple[Array, Array]:
    """Returns (out, lse) whatever return_softmax_lse says.

    positive_values, which no public function has: values without their signs, so that out is the sum of the
    magnitudes that the weights multiply.
    """
    keys, values = decode(k, kv_cache_dtype), decode(v, kv_cache_dtype)
    values = np.abs(values) if positive_values else values
    if block_table is not None:
        assert seqused_k is not None
        keys, values = kv_views(layout, keys, values)
        keys_of = _paged_keys(keys, values, block_table, seqused_k)
    else:
        assert cu_seqlens_k is not None
        keys_of = dense_keys(keys, values, cu_seqlens_k, seqused_k)
    return _attention(
        q,
        query_ranges(cu_seqlens_q, len(q), num_seqs),
        keys_of,
        num_kv_heads=keys.shape[-2],
        value_dim=values.shape[-1],
        softmax_scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=s_aux,
        leftpad=leftpad_k,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        num_sequences=len(cu_seqlens_q) - 1,
    )


def _views(kv_cache: Array | tuple[Array, Array], layout: str) -> tuple[Array, Array]:
    """Writable views [P, B, Hk, D] of a cache as paged_attention takes it."""
    if isinstance(kv_cache, tuple):
        return kv_views("HND" if layout == "HND" else "NHD", *kv_cache)
    return kv_views(layout, kv_cache)


def paged_attention(
    query: Array,
    kv_cache: Array | tuple[Array, Array],
    context_lens: Array,
    block_tables: Array,
    query_start_loc: Array,
    num_seqs: Array,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    layout: str = "interleaved",
    kv_cache_dtype: str = "auto",
    causal: bool = True,
    window_size: Window | None = None,
    alibi_slopes: Array | None = None,
    s_aux: Array | None = None,
    return_softmax_lse: bool = False,
    max_seqlen_q: int | None = None,  # of no effect
    batch_invariant: bool = False,  # of the bits
    positive_values: bool = False,  # as for flash_attn_varlen_func
) -> tuple[Array, Array]:
    """Returns (out, lse) whatever return_softmax_lse says."""
    keys, values = (decode(view, kv_cache_dtype) for view in _views(kv_cache, layout))
    values = np.abs(values) if positive_values else values
    window = (-1, -1) if window_size is None else window_size
    return _attention(
        query,
        query_ranges(query_start_loc, len(query), num_seqs),
        _paged_keys(keys, values, block_tables, context_lens),
        num_kv_heads=keys.shape[2],
        value_dim=values.shape[3],
        softmax_scale=scale,
        causal=causal,
        window=window if sliding_window is None else (sliding_window - 1, -1),
        softcap=soft_cap or 0.0,
        alibi_slopes=alibi_slopes,
        sinks=s_aux,
        leftpad=None,
        q_descale=None,
        k_descale=k_scale,
        v_descale=v_scale,
        num_sequences=len(query_start_loc) - 1,
    )


def slots_of_new_tokens(
    num_tokens: int,
    num_blocks: int,
    block_size: int,
    context_lens: Array,
    block_tables: Array,
    query_start_loc: Array,
    num_seqs: Array,
) -> Array:
    """Where ragged_paged_attention writes each token without a slot_mapping; -1: nowhere."""
    slots = np.full(num_tokens, -1, np.int64)
    for s, queries in enumerate(query_ranges(query_start_loc, num_tokens, num_seqs)):
        if queries is None or context_lens[s] < 0:
            continue
        for token in range(*queries):
            position = int(context_lens[s]) - (queries[1] - token)
            page, offset = divmod(position, block_size)
            if position >= 0 and page < block_tables.shape[1] and 0 <= block_tables[s, page] < num_blocks:
                slots[token] = int(block_tables[s, page]) * block_size + offset
    return slots


def ragged_paged_attention(
    query: Array,
    key: Array,
    value: Array,
    kv_cache: Array | tuple[Array, Array],
    context_lens: Array,
    block_tables: Array,
    query_start_loc: Array,
    num_seqs: Array,
    scale: float,
    slot_mapping: Array | None = None,
    layout: str = "interleaved",
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    kv_cache_dtype: str = "auto",
    **others: Any,
) -> tuple[Array, Array, Array | tuple[Array, Array]]:
    """Returns (out, lse, kv_cache) whatever return_softmax_lse says. others: as for paged_attention."""
    new = (kv_cache[0].copy(), kv_cache[1].copy()) if isinstance(kv_cache, tuple) else kv_cache.copy()
    keys, values = _views(new, layout)
    index = (context_lens, block_tables, query_start_loc, num_seqs)
    if slot_mapping is None:
        slot_mapping = slots_of_new_tokens(len(query), keys.shape[0], keys.shape[1], *index)
    _write(key, keys, slot_mapping, kv_cache_dtype, k_scale)
    _write(value, values, slot_mapping, kv_cache_dtype, v_scale)
    others |= {"layout": layout, "kv_cache_dtype": kv_cache_dtype, "k_scale": k_scale, "v_scale": v_scale}
    return *paged_attention(query, new, *index, scale, **others), new


def merge_attn_states(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    def part(out: Array, lse: Array) -> tuple[Array, Array]:
        empty = np.isinf(lse)
        values = np.where(empty.T[:, :, None], 0.0, out.astype(np.float64))
        return values, np.where(empty, -np.inf, lse.astype(np.float64))

    a, log_a = part(out_a, lse_a)
    b, log_b = part(out_b, lse_b)
    top = np.maximum(log_a, log_b)
    top = np.where(np.isneginf(top), 0.0, top)
    weight_a, weight_b = (np.exp(log - top).T[:, :, None] for log in (log_a, log_b))
    total = weight_a + weight_b
    return (weight_a * a + weight_b * b) / np.where(total == 0, 1.0, total), np.logaddexp(log_a, log_b)
