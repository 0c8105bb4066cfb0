"""Random ragged batches: from the description of a case to the arguments of a call.

Everything that a call must not use holds NaN: rows of q outside every sequence, pages that no table names,
tails of pages, keys before the left padding, keys after the used length. Metadata of sequences that do not
exist is garbage.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests import reference
from tests.checks import DTYPES

Array = np.ndarray
Arguments = dict[str, Any]
FP8_NAMES = {"e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2"}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of flash_attn_varlen_func, paged_attention or ragged_paged_attention."""

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
    v_dim: int | None = None  # of values, where it is another

    @property
    def dims(self) -> tuple[int, int]:
        """The head sizes of keys and of values."""
        return self.dim, self.dim if self.v_dim is None else self.v_dim

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
    stored = [_stored(rng, (int(offsets[-1]), case.heads[1], dim), case) for dim in case.dims]
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
    return empty_caches(layout, blocks, case.page or 1, case.heads[1], case.dim, DTYPES[name], case.v_dim)


def empty_caches(
    layout: str, blocks: int, page: int, heads: int, dim: int, dtype: np.dtype, v_dim: int | None = None
) -> tuple[Array, ...]:
    """Caches of NaN: one tensor or two, by layout."""
    v_dim = dim if v_dim is None else v_dim
    shapes: dict[str, list[tuple[int, ...]]] = {
        "NHD": [(blocks, page, heads, dim), (blocks, page, heads, v_dim)],
        "HND": [(blocks, heads, page, dim), (blocks, heads, page, v_dim)],
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
                views: tuple[Array, ...] = arguments["k"], arguments["v"]
            else:
                at = arguments["block_table"][s, position // case.page], position % case.page
                views = reference.kv_views(case.layout, arguments["k"], arguments["v"])
            for view in views:
                view[at] = nans((), view.dtype)
    return _padded(rng, leftpad, case)


def paged_attention_arguments(rng: np.random.Generator, case: Case) -> Arguments:
    """The arguments of paged_attention; a causal case's window of left keys alone is a sliding_window."""
    query, query_start_loc = _queries(rng, case)
    caches, table, lengths = paged_keys(rng, case, case.layout)
    seqs = len(query_start_loc) - 1
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
        "return_softmax_lse": case.lse,
    }
    if not case.causal:
        arguments["causal"] = False
    if case.causal and case.window[0] >= 0 and case.window[1] <= 0:
        arguments["sliding_window"] = case.window[0] + 1
    elif case.window != (-1, -1):
        arguments["window_size"] = case.window
    if case.softcap:
        arguments["soft_cap"] = case.softcap
    if case.alibi:
        arguments["alibi_slopes"] = _positive(rng, case.alibi, seqs, case.heads[0]) * np.float32(0.2)
    if case.sinks:
        arguments["s_aux"] = normal(rng, (case.heads[0],), DTYPES[case.sinks])
    if case.descale:
        for name in ("k_scale", "v_scale"):
            arguments[name] = _positive(rng, case.descale, seqs, case.heads[1])
    return arguments


def caches_of(arguments: Arguments) -> tuple[Any, ...]:
    """The cache of paged_attention as one tensor or two."""
    given = arguments["kv_cache"]
    return given if isinstance(given, tuple) else (given,)


def tokens_with_copies(heads: int, dims: tuple[int, int]) -> int:
    """So many tokens of one prompt that on a Hopper GPU keys are copied, where that helps: see key_copies.h."""
    if max(dims) > 256:
        return 500
    least_products = 6e9
    return math.ceil(math.sqrt(least_products / (heads * sum(dims))))


def spoil(rng: np.random.Generator, table: Array, bad: Array, blocks: int) -> None:
    """Put pages that a cache of `blocks` does not have into the `bad` entries of a block table."""
    table[bad] = rng.choice([-1, -(2**31), 2**31 - 1, blocks, blocks + 1, 2**30], bad.sum())


def without_poison(rng: np.random.Generator, arguments: Arguments) -> Arguments:
    """Numbers in place of NaN: a call with other index tensors may see what is poison in this one."""

    def clean(array: Array) -> Array:
        if array.dtype == np.uint8:
            # 0x40 is 2.0 in both fp8 formats: values of unit size, as the tolerances want.
            return np.where(array == 0x7F, rng.integers(0, 0x41, array.shape, np.uint8), array)
        return np.where(np.isnan(array), normal(rng, array.shape, array.dtype), array)

    cleaned = dict(arguments)
    for name in {"q", "k", "v", "query", "key", "value", "kv_cache"} & arguments.keys():
        value = arguments[name]
        cleaned[name] = tuple(map(clean, value)) if isinstance(value, tuple) else clean(value)
    return cleaned


def positions(case: Case, arguments: Arguments) -> Iterator[tuple[int, int, int]]:
    """Of each token that has a place in its sequence: the token, and its page and offset."""
    assert case.page is not None
    starts = itertools.accumulate((len_q for len_q, _ in case.lens), initial=0)
    for s, (start, (len_q, len_k)) in enumerate(zip(starts, case.lens, strict=False)):
        for i in range(max(len_q - len_k, 0), len_q):
            page, offset = divmod(len_k - len_q + i, case.page)
            yield start + i, int(arguments["block_tables"][s, page]), offset


def ragged_paged_attention_arguments(
    rng: np.random.Generator, case: Case, new: str = "same", slots: str | None = None
) -> Arguments:
    """The arguments of ragged_paged_attention: the cache of a case without its new tokens, and those.

    new: the dtype of key and value, or "same" as the cache's elements. slots: "i32" or "i64", None: no slot_mapping;
    "short" is one without the padding tokens, which else have negative slots there. Padding tokens are NaN.
    """
    arguments = paged_attention_arguments(rng, case)
    views = reference.kv_views(case.layout, *caches_of(arguments))
    element = case.dtype if case.cache == "same" else case.cache.removeprefix("u8:")
    if new not in ("same", element):
        arguments["kv_cache_dtype"] = FP8_NAMES[element]
    tokens = len(arguments["query"])
    for name, dim in zip(("key", "value"), case.dims, strict=True):
        arguments[name] = nans((tokens, case.heads[1], dim), DTYPES[element if new == "same" else new])
    mapping = np.full(tokens, -1, np.int64 if slots == "i64" else np.int32)
    for token, block, offset in positions(case, arguments):
        mapping[token] = block * (case.page or 1) + offset
        for name, view in zip(("key", "value"), views, strict=True):
            arguments[name][token] = normal(rng, view.shape[2:], arguments[name].dtype)
            view[block, offset] = nans((), view.dtype)
    if slots:
        real = sum(len_q for len_q, _ in case.lens)
        arguments["slot_mapping"] = mapping[:real] if slots == "short" else mapping
    return arguments


def qkvpacked(arguments: Arguments) -> Arguments | None:
    """Arguments of ragged_paged_attention as those of its packed form; None if they cannot be packed."""
    rest = dict(arguments)
    tensors = [rest.pop(name) for name in ("query", "key", "value")]
    if len({(x.dtype, x.shape[2]) for x in tensors}) > 1:
        return None
    return {"qkv": np.concatenate(tensors, axis=1)} | rest
