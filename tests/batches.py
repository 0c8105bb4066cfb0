"""Random ragged batches: from the description of a case to the arguments of a call.

Everything that a call must not use holds NaN: rows of q outside every sequence, pages that no table names,
tails of pages, keys before the left padding, keys after the used length. Metadata of sequences that do not
exist is garbage.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tests import reference
from tests.checks import DTYPES

Array = np.ndarray
Arguments = dict[str, Any]
FP8_NAMES = {"e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2"}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of flash_attn_varlen_func or paged_attention."""

    lens: tuple[tuple[int, int], ...]  # of each sequence: queries, keys
    heads: tuple[int, int] = (4, 2)  # of queries, of keys
    dim: int = 64
    dtype: str = "f32"
    cache: str = "same"  # "same" as dtype, "e4m3", "e5m2", or with "u8:" before it: as raw bytes
    page: int | None = None  # None: dense keys
    layout: str = "NHD"
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: str | None = None  # the shape: "H" or "SH"
    sinks: str | None = None  # the dtype
    leftpad: bool = False
    descale: str | None = None  # the shape: "1", "H" or "SH"
    scale: float | None = None
    pad_tokens: int = 0  # rows of q after the last sequence
    pad_seqs: int | None = None  # sequences after the last real one; None: no num_seqs
    used: bool = False  # dense: seqused_k beside cu_seqlens_k, with unused keys between the sequences
    lse: bool = True

    def __str__(self) -> str:
        changed = [f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return "-".join(f"{f.name}={getattr(self, f.name)}" for f in changed).replace(" ", "")

    @property
    def kv_cache_dtype(self) -> str:
        """The argument of that name."""
        return FP8_NAMES[self.cache[3:]] if self.cache.startswith("u8:") else "auto"


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """Numbers of unit size."""
    return rng.standard_normal(shape, np.float32).astype(dtype)


def nans(shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """An array of poison; raw bytes are NaN in both fp8 formats."""
    return np.full(shape, 0x7F, dtype) if dtype == np.uint8 else np.full(shape, np.nan, dtype)


def _stored(rng: np.random.Generator, shape: tuple[int, ...], case: Case) -> Array:
    """Random K or V as the cache of a case stores them."""
    name = case.dtype if case.cache == "same" else case.cache.removeprefix("u8:")
    values = normal(rng, shape, DTYPES[name])
    return values.view(np.uint8) if case.cache.startswith("u8:") else values


def _queries(rng: np.random.Generator, case: Case) -> tuple[Array, Array]:
    """(q, cu_seqlens_q)."""
    lengths = [len_q for len_q, _ in case.lens]
    tokens = sum(lengths)
    q = nans((tokens + case.pad_tokens, case.heads[0], case.dim), DTYPES[case.dtype])
    q[:tokens] = normal(rng, (tokens, *q.shape[1:]), q.dtype)
    return q, _padded(rng, np.cumsum([0, *lengths]), case)


def _padded(rng: np.random.Generator, metadata: Array, case: Case) -> Array:
    """Metadata with garbage for the sequences that do not exist."""
    garbage = rng.integers(-(2**31), 2**31, (case.pad_seqs or 0, *metadata.shape[1:]))
    return np.concatenate([metadata, garbage]).astype(np.int32)


def dense_keys(rng: np.random.Generator, case: Case) -> Arguments:
    """k, v and what finds the keys in them."""
    lengths = np.array([len_k for _, len_k in case.lens], np.int64)
    room = lengths + rng.integers(0, 9, len(lengths)) if case.used else lengths
    offsets = np.cumsum([0, *room])
    shape = (int(offsets[-1]), case.heads[1], case.dim)
    stored = [_stored(rng, shape, case) for _ in "kv"]
    for start, length, end in zip(offsets, lengths, offsets[1:], strict=False):
        for array in stored:
            array[start + length : end] = nans((), array.dtype)
    arguments = {"k": stored[0], "v": stored[1], "cu_seqlens_k": _padded(rng, offsets, case)}
    if case.used:
        arguments["seqused_k"] = _padded(rng, lengths, case)
    return arguments


def paged_keys(rng: np.random.Generator, case: Case, layout: str) -> tuple[tuple[Array, ...], Array, Array]:
    """(caches, block_table, lengths); the caches are one tensor or two, by layout."""
    assert case.page is not None
    lengths = np.array([len_k for _, len_k in case.lens], np.int64)
    pages = -(-lengths // case.page)
    total = int(pages.sum())
    blocks = rng.permutation(total + 3)  # three pages belong to nobody
    table = np.full((len(lengths), max(int(pages.max(initial=0)), 1) + 1), blocks[-1], np.int64)
    caches = _caches(case, layout, len(blocks))
    used = iter(blocks)
    for s, length in enumerate(lengths):
        for page in range(pages[s]):
            table[s, page] = block = next(used)
            for view in reference.kv_views(layout, *caches):
                count = min(case.page, int(length) - page * case.page)
                view[block, :count] = _stored(rng, (count, *view.shape[2:]), case)
    return caches, _padded(rng, table, case), _padded(rng, lengths, case)


def _caches(case: Case, layout: str, blocks: int) -> tuple[Array, ...]:
    name = case.dtype if case.cache == "same" else case.cache.split(":")[0]
    return empty_caches(layout, blocks, case.page or 1, case.heads[1], case.dim, DTYPES[name])


def empty_caches(
    layout: str, blocks: int, page: int, heads: int, dim: int, dtype: np.dtype
) -> tuple[Array, ...]:
    """Caches of NaN: one tensor or two, by layout."""
    shapes = {
        "NHD": [(blocks, page, heads, dim)] * 2,
        "HND": [(blocks, heads, page, dim)] * 2,
        "interleaved": [(blocks, page, 2 * heads, dim)],
        "packed_HND": [(blocks, heads, page, 2 * dim)],
        "packed_NHD": [(blocks, page, heads, 2 * dim)],
        "stacked": [(2, blocks, page, heads, dim)],
    }
    return tuple(nans(shape, dtype) for shape in shapes[layout])


def _positive(rng: np.random.Generator, shape: str, seqs: int, heads: int) -> Array:
    sizes = {"1": (1,), "H": (heads,), "SH": (seqs, heads)}[shape]
    return rng.uniform(0.25, 2.0, sizes).astype(np.float32)


def flash_attn_arguments(rng: np.random.Generator, case: Case) -> Arguments:
    """The arguments of flash_attn_varlen_func."""
    q, cu_seqlens_q = _queries(rng, case)
    arguments: Arguments = {
        "q": q,
        "max_seqlen_q": max(len_q for len_q, _ in case.lens),
        "cu_seqlens_q": cu_seqlens_q,
        "max_seqlen_k": max(len_k for _, len_k in case.lens),
        "causal": case.causal,
        "window_size": case.window,
        "softcap": case.softcap,
        "return_softmax_lse": case.lse,
        "kv_cache_dtype": case.kv_cache_dtype,
    }
    if case.page:
        (k, v), table, lengths = paged_keys(rng, case, case.layout)
        arguments |= {"k": k, "v": v, "block_table": table, "seqused_k": lengths, "layout": case.layout}
    else:
        arguments |= dense_keys(rng, case)
    seqs = len(cu_seqlens_q) - 1
    if case.pad_seqs is not None:
        arguments["num_seqs"] = np.array([len(case.lens)], np.int32)
    if case.scale is not None:
        arguments["softmax_scale"] = case.scale
    if case.alibi:
        arguments["alibi_slopes"] = _positive(rng, case.alibi, seqs, case.heads[0]) * np.float32(0.2)
    if case.sinks:
        arguments["s_aux"] = normal(rng, (case.heads[0],), DTYPES[case.sinks])
    if case.descale:
        for name in ("q_descale", "k_descale", "v_descale"):
            arguments[name] = _positive(rng, case.descale, seqs, case.heads[1])
    if case.leftpad:
        arguments["leftpad_k"] = _leftpad(rng, case, arguments)
    return arguments


def _leftpad(rng: np.random.Generator, case: Case, arguments: Arguments) -> Array:
    leftpad = np.array([rng.integers(0, len_k + 2) for _, len_k in case.lens])
    for s, (_, len_k) in enumerate(case.lens):
        for position in range(min(int(leftpad[s]), len_k)):
            if case.page is None:
                at: Any = arguments["cu_seqlens_k"][s] + position
                views = arguments["k"], arguments["v"]
            else:
                at = arguments["block_table"][s, position // case.page], position % case.page
                views = reference.kv_views(case.layout, arguments["k"], arguments["v"])
            for view in views:
                view[at] = nans((), view.dtype)
    return _padded(rng, leftpad, case)


def paged_attention_arguments(rng: np.random.Generator, case: Case) -> Arguments:
    """The arguments of paged_attention; a case's window is (sliding_window - 1, 0)."""
    query, query_start_loc = _queries(rng, case)
    caches, table, lengths = paged_keys(rng, case, case.layout)
    arguments: Arguments = {
        "query": query,
        "kv_cache": caches if len(caches) == 2 else caches[0],
        "context_lens": lengths,
        "block_tables": table,
        "query_start_loc": query_start_loc,
        "num_seqs": np.array([len(case.lens)], np.int32),
        "scale": case.dim**-0.5 if case.scale is None else case.scale,
        "layout": case.layout,
        "kv_cache_dtype": case.kv_cache_dtype,
    }
    if case.window[0] >= 0:
        arguments["sliding_window"] = case.window[0] + 1
    if case.softcap:
        arguments["soft_cap"] = case.softcap
    if case.descale:
        for name in ("k_scale", "v_scale"):
            arguments[name] = _positive(rng, case.descale, len(query_start_loc) - 1, case.heads[1])
    return arguments
