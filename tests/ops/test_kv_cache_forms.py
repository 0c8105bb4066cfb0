"""Functions of other libraries over a KV cache, against a float64 reference of their own."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from tests import reference
from tests.checks import DTYPES, TOLERANCE, assert_close, assert_same_bits
from tests.frontends import Frontend, JaxFrontend, TorchFrontend

Arguments = dict[str, Any]
B, HEADS, KV_HEADS, DIM, DIM_V = 3, 4, 2, 16, 24
ROWS, SIZE = 5, 40  # of a dense cache
PAGES, PAGE = 32, 8
LENGTHS = np.array([0, 23, 37], np.int32)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def flat(results: tuple[Any, ...]) -> list[np.ndarray]:
    """What JAX returns caches as, a pair, is in PyTorch the two arguments."""
    return list(itertools.chain.from_iterable(x if isinstance(x, tuple) else (x,) for x in results))


def turn(x: np.ndarray, angles: np.ndarray, positions: np.ndarray, interleaved: bool) -> np.ndarray:
    """Rotary embedding as a product of complex numbers, rounded once to x's dtype.

    x: [S, H, D]; angles: [positions, R / 2]; positions: [S].
    """
    half = angles.shape[1]
    out = x.astype(np.float64)
    first, second = slice(half), slice(half, 2 * half)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    turned = (out[..., first] + 1j * out[..., second]) * np.exp(1j * angles[positions])[:, None]
    out[..., first], out[..., second] = turned.real, turned.imag
    return out.astype(x.dtype).astype(np.float64)


def expected_of(
    given: Arguments, angles: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """out, LSE and the caches after the call, sequence by sequence."""
    caches = [given[name].astype(np.float64) for name in ("k_cache", "v_cache")]
    outs, lses = [], []
    for b in range(B):
        held = given.get("cache_seqlens", caches[0].shape[1])
        held = int(held if np.ndim(held) == 0 else held[b])
        leftpad = int(given["cache_leftpad"][b]) if "cache_leftpad" in given else 0
        query, new = given["q"][b], 0
        table, size = [given["cache_batch_idx"][b] if "cache_batch_idx" in given else b], caches[0].shape[1]
        if "block_table" in given:
            table = given["block_table"][b]
        places = [(page, i) for page in table for i in range(size)]
        if "k" in given:
            parts = [given["k"][b], given["v"][b]]
            new = len(parts[0])
            if angles is not None:
                positions = np.arange(held, held + max(new, len(query)))  # padding counts
                moving = given.get("causal") or given.get("window_size", (-1, -1)) != (-1, -1)
                of_q = positions[: len(query)] if moving else positions[:1].repeat(len(query))
                query = turn(query, angles, of_q, given.get("rotary_interleaved", True))
                parts[0] = turn(parts[0], angles, positions[:new], given.get("rotary_interleaved", True))
            for cache, part in zip(caches, parts, strict=True):
                for place, row in zip(places[held : held + new], part, strict=False):
                    cache[place] = row
        keys, values = (np.stack([cache[place] for place in places[: held + new]]) for cache in caches)
        arguments = {
            name: given[name] for name in ("causal", "window_size", "softcap", "s_aux") if name in given
        }
        out, lse = reference.flash_attn_varlen_func(
            query,
            keys,
            values,
            max_seqlen_q=len(query),
            cu_seqlens_q=np.array([0, len(query)]),
            max_seqlen_k=len(keys),
            cu_seqlens_k=np.array([0, len(keys)]),
            leftpad_k=np.array([leftpad]),
            **arguments,
        )
        outs.append(out)
        lses.append(lse)
    return np.stack(outs), np.stack(lses), *caches


def dense(rng: np.random.Generator, queries: int = 1, **more: Any) -> Arguments:
    caches = {
        "k_cache": normal(rng, ROWS, SIZE, KV_HEADS, DIM),
        "v_cache": normal(rng, ROWS, SIZE, KV_HEADS, DIM_V),
    }
    return {"q": normal(rng, B, queries, HEADS, DIM), **caches, **more}


def paged(rng: np.random.Generator, queries: int = 1, **more: Any) -> Arguments:
    caches = {
        "k_cache": normal(rng, PAGES, PAGE, KV_HEADS, DIM),
        "v_cache": normal(rng, PAGES, PAGE, KV_HEADS, DIM_V),
    }
    table = rng.permutation(PAGES)[: B * 6].reshape(B, 6).astype(np.int32)
    return {"q": normal(rng, B, queries, HEADS, DIM), **caches, "block_table": table, **more}


def tables(angles: np.ndarray, dtype: str = "f32") -> Arguments:
    return {
        "rotary_cos": np.cos(angles).astype(DTYPES[dtype]),
        "rotary_sin": np.sin(angles).astype(DTYPES[dtype]),
    }


def new(rng: np.random.Generator, count: int) -> Arguments:
    return {"k": normal(rng, B, count, KV_HEADS, DIM), "v": normal(rng, B, count, KV_HEADS, DIM_V)}


def calls(rng: np.random.Generator) -> dict[str, tuple[Arguments, np.ndarray | None]]:
    """Calls, and the angles of their rotary embedding."""
    angles = rng.uniform(0, 6, (SIZE + 8, 4))
    rows = np.array([3, 0, 4], np.int32)
    sinks = normal(rng, HEADS)
    return {
        "all of the cache": (dense(rng), None),
        "a number": (dense(rng, cache_seqlens=11), None),
        "rows": (dense(rng, cache_seqlens=LENGTHS + 1, cache_batch_idx=rows), None),
        "append": (dense(rng, 3, **new(rng, 3), cache_seqlens=LENGTHS, causal=True), None),
        "append to rows": (dense(rng, **new(rng, 1), cache_seqlens=LENGTHS, cache_batch_idx=rows), None),
        "append to pages": (paged(rng, 5, **new(rng, 5), cache_seqlens=LENGTHS, causal=True), None),
        "more keys than queries": (paged(rng, 2, **new(rng, 6), cache_seqlens=LENGTHS, causal=True), None),
        "left padding": (
            dense(
                rng, 2, **new(rng, 2), cache_seqlens=LENGTHS + 1, cache_leftpad=np.array([1, 7, 0], np.int32)
            ),
            angles,
        ),
        "rotary": (paged(rng, 3, **new(rng, 3), cache_seqlens=LENGTHS, causal=True), angles),
        "rotary of halves": (
            dense(rng, 3, **new(rng, 3), cache_seqlens=LENGTHS, window_size=(9, 0), rotary_interleaved=False),
            angles,
        ),
        "rotary of all queries alike": (dense(rng, 3, **new(rng, 3), cache_seqlens=LENGTHS), angles),
        "sinks and softcap": (
            paged(rng, 2, **new(rng, 2), cache_seqlens=LENGTHS, causal=True, softcap=3.0, s_aux=sinks),
            None,
        ),
    }


NAMES = list(calls(np.random.default_rng(0)))


@pytest.mark.parametrize("name", NAMES)
def test_flash_attn_with_kvcache(frontend: Frontend, rng: np.random.Generator, name: str) -> None:
    given, angles = calls(rng)[name]
    if angles is not None:
        given |= tables(angles)
    expected = expected_of(given, angles)
    mutated = ("k_cache", "v_cache") if "k" in given else ()
    results = frontend.run("flash_attn_with_kvcache", {**given, "return_softmax_lse": True}, mutated)
    got = flat(results)
    assert len(got) == (4 if mutated else 2)
    for array, want in zip(got, expected, strict=False):
        np.testing.assert_allclose(array, want, atol=2e-5, rtol=1e-4)


def test_tokens_without_a_place_are_not_written(frontend: Frontend, rng: np.random.Generator) -> None:
    given = dense(rng, **new(rng, 4), cache_seqlens=np.array([38, -2, 40], np.int32))
    results = frontend.run("flash_attn_with_kvcache", given, ("k_cache", "v_cache"))
    got = flat(results)
    for cache, name, part in zip(got[1:], ("k_cache", "v_cache"), "kv", strict=True):
        expected = given[name].copy()
        expected[0, 38:] = given[part][0, :2]
        expected[1, :2] = given[part][1, 2:]
        assert_same_bits(cache, expected, name)


@pytest.mark.frontends("torch", "jax")
def test_keys_are_turned_by_their_slots(frontend: Frontend, rng: np.random.Generator) -> None:
    """As flash-attention does: what a key in a slot is does not depend on the padding before it."""
    angles = rng.uniform(0, 6, (SIZE, 4))
    given = dense(rng, 2, **new(rng, 2), cache_seqlens=LENGTHS, causal=True, **tables(angles))
    expected = given["k_cache"].copy()
    for b, length in enumerate(LENGTHS):
        for i in range(2):
            angle = np.broadcast_to(angles[length + i], (KV_HEADS, 4))
            key = given["k"][b, i].astype(np.float64)
            expected[b, length + i] = key
            expected[b, length + i, :, 0:8:2] = key[:, 0:8:2] * np.cos(angle) - key[:, 1:8:2] * np.sin(angle)
            expected[b, length + i, :, 1:8:2] = key[:, 1:8:2] * np.cos(angle) + key[:, 0:8:2] * np.sin(angle)
    for leftpad in (np.array([0, 0, 0], np.int32), np.array([0, 9, 36], np.int32)):
        got = flat(
            frontend.run(
                "flash_attn_with_kvcache", {**given, "cache_leftpad": leftpad}, ("k_cache", "v_cache")
            )
        )
        np.testing.assert_allclose(got[1], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("of_tables", ["f32", "same"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_rotary_tables_of_other_types(
    frontend: Frontend, rng: np.random.Generator, dtype: str, of_tables: str
) -> None:
    """Whatever the tables' type is, what is turned is rounded once."""
    angles = rng.uniform(0, 6, (SIZE, 4))
    of_tables = dtype if of_tables == "same" else of_tables
    given = dense(rng, 3, **new(rng, 3), cache_seqlens=LENGTHS, causal=True)
    given = {
        name: x.astype(DTYPES[dtype]) if x.dtype == np.float32 else x
        for name, x in given.items()
        if isinstance(x, np.ndarray)
    } | {"causal": True, **tables(angles, of_tables)}
    got = flat(frontend.run("flash_attn_with_kvcache", given, ("k_cache", "v_cache")))
    cos, sin = (given[name].astype(np.float64) for name in ("rotary_cos", "rotary_sin"))
    keys, first = got[1].astype(np.float64), given["k"].astype(np.float64)
    unit = 2.0**-8 if dtype == "bf16" else 2.0**-11
    for b, length in enumerate(LENGTHS):
        at = slice(length, length + 3)
        even, odd = first[b, ..., 0:8:2], first[b, ..., 1:8:2]
        c, s = cos[at][:, None], sin[at][:, None]
        np.testing.assert_allclose(keys[b, at, :, 0:8:2], even * c - odd * s, rtol=1.01 * unit, atol=1e-6)
        np.testing.assert_allclose(keys[b, at, :, 1:8:2], odd * c + even * s, rtol=1.01 * unit, atol=1e-6)
        assert_same_bits(got[1][b, at, :, 8:], given["k"][b, ..., 8:], "what is not turned")
    out = expected_of(given, np.arctan2(sin, cos))[0]
    if of_tables == "f32":  # rounded tables are no rotation
        assert_close(got[0], out, TOLERANCE[dtype])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_append_paged_kv_cache(frontend: Frontend, rng: np.random.Generator, layout: str) -> None:
    """FlashInfer's form of pages: those of all sequences, one sequence after the other."""
    shape = (PAGES, PAGE, KV_HEADS, DIM) if layout == "NHD" else (PAGES, KV_HEADS, PAGE, DIM)
    caches = normal(rng, *shape), normal(rng, *shape)
    key, value = normal(rng, 10, KV_HEADS, DIM), normal(rng, 10, KV_HEADS, DIM)
    batch = np.array([0, 2, 2, 1, 0, 2, 2, -2, 3, -1], np.int32)  # there are 3 sequences
    positions = np.array([9, 0, 8, 3, 16, -1, 15, 1, 2, 6], np.int32)  # sequence 0 has no third page
    indptr = np.array([0, 2, 3, 5], np.int32)
    indices = rng.permutation(PAGES)[:5].astype(np.int32)
    views = reference.kv_views(layout, *(cache.copy() for cache in caches))
    for token, (b, position) in enumerate(zip(batch, positions, strict=True)):
        if 0 <= b < 3 and 0 <= position < PAGE * (indptr[b + 1] - indptr[b]):
            page = indices[indptr[b] + position // PAGE]
            views[0][page, position % PAGE], views[1][page, position % PAGE] = key[token], value[token]
    given = {
        "append_key": key,
        "append_value": value,
        "batch_indices": batch,
        "positions": positions,
        "paged_kv_cache": caches,
        "kv_indices": indices,
        "kv_indptr": indptr,
        "kv_layout": layout,
    }
    results = frontend.run("append_paged_kv_cache", given, ("paged_kv_cache",))
    got = flat(results)
    for array, view in zip(reference.kv_views(layout, *got), views, strict=True):
        assert_same_bits(np.ascontiguousarray(array), np.ascontiguousarray(view), "cache")


INT32 = (-(2**31), -(2**16), -2, -1, 2**16, 2**28, 2**29, 2**30, 2**31 - 1)


def hostile(most: int) -> st.SearchStrategy[int]:
    """Mostly what is right, and anything."""
    return st.integers(0, most) | st.integers(-3, most + 3) | st.sampled_from(INT32)


@pytest.mark.frontends("torch", "jax")
@pytest.mark.parametrize("sequences", [0, 1, 3])
@drawn(data=st.data())
@settings(max_examples=25)
def test_append_paged_kv_cache_by_any_indices(
    frontend: Frontend, sequences: int, data: st.DataObject
) -> None:
    """A token without a place is written nowhere, and touches no other sequence."""
    tokens, blocks, size = 12, 6, 4

    def array(most: int, count: int) -> np.ndarray:
        return np.array(data.draw(st.lists(hostile(most), min_size=count, max_size=count)), np.int32)

    pages = data.draw(st.sampled_from([0, 5]))
    batch, positions = array(sequences - 1 if sequences else 2, tokens), array(2 * size, tokens)
    indices, indptr = array(blocks - 1, pages), array(pages, sequences + 1)
    caches = np.zeros((blocks, size, 1, 8), np.float32), np.zeros((blocks, size, 1, 8), np.float32)
    key = np.arange(1, tokens + 1, dtype=np.float32)[:, None, None].repeat(8, 2)
    places: dict[tuple[int, int], list[float]] = {}  # of two tokens for one place either may stay
    for token, (b, position) in enumerate(zip(batch.tolist(), positions.tolist(), strict=True)):
        if 0 <= b < sequences and position >= 0:
            place = int(indptr[b]) + position // size
            if 0 <= place < min(int(indptr[b + 1]), pages) and 0 <= indices[place] < blocks:
                places.setdefault((int(indices[place]), position % size), []).append(token + 1.0)
    given = {
        "append_key": key,
        "append_value": -key,
        "batch_indices": batch,
        "positions": positions,
        "paged_kv_cache": caches,
        "kv_indices": indices,
        "kv_indptr": indptr,
    }
    got = flat(frontend.run("append_paged_kv_cache", given, ("paged_kv_cache",)))
    for cache, sign in zip(got, (1, -1), strict=True):
        for place in np.ndindex(blocks, size):
            (stays,) = set((sign * cache[place]).ravel().tolist())  # a row is one token's
            assert stays in places.get(place, [0.0]), place


@pytest.mark.frontends("torch", "jax")
def test_pages_that_do_not_exist_are_not_written(frontend: Frontend, rng: np.random.Generator) -> None:
    """Not even where the product of a page and its size is that of one that does."""
    given = paged(rng, **new(rng, 1), cache_seqlens=np.array([3, 8, 17], np.int32))
    given["block_table"] = np.array([[2**29, 1], [2, 2**29 + 1], [3, 4]], np.int32)
    given["cache_seqlens"][2] = 9
    got = flat(frontend.run("flash_attn_with_kvcache", given, ("k_cache", "v_cache")))
    for cache, name, part in zip(got[1:], ("k_cache", "v_cache"), "kv", strict=True):
        expected = given[name].copy()
        expected[4, 1] = given[part][2, 0]
        assert_same_bits(cache, expected, name)


@pytest.mark.frontends("torch", "jax")
def test_names_of_newer_versions(frontend: Frontend, rng: np.random.Generator) -> None:
    given = paged(
        rng, 2, **new(rng, 2), cache_seqlens=LENGTHS, s_aux=normal(rng, HEADS), return_softmax_lse=True
    )
    other = {**given}
    aliases = {"block_table": "page_table", "s_aux": "learnable_sink", "return_softmax_lse": "return_lse"}
    for name, alias in aliases.items():
        other[alias] = other.pop(name)
    first, second = (frontend.run("flash_attn_with_kvcache", arguments) for arguments in (given, other))
    assert_same_bits(second[0], first[0], "out")
    assert_same_bits(second[1], first[1], "lse")


WRONG: dict[str, tuple[Arguments, str]] = {
    "both names": (
        {"page_table": None, "block_table": None},
        "page_table: got it beside block_table; accepted: one",
    ),
    "its name": (
        {"learnable_sink": np.zeros(3, np.float32)},
        r"learnable_sink: got shape \[3\]; accepted: \[Hq\] with Hq = 4",
    ),
    "no value": ({"v": None}, "v: got None; accepted: k and v, or neither"),
    "no lengths": ({"cache_seqlens": None}, "cache_seqlens: got None; accepted: where k and v go"),
    "half a rotation": (
        {"rotary_cos": np.zeros((9, 4), np.float32)},
        "rotary_sin: got None; accepted: rotary_cos and",
    ),
    "rows of pages": (
        {"cache_batch_idx": LENGTHS},
        "cache_batch_idx: got a tensor beside block_table; accepted: None",
    ),
    "heads": (
        {"k": np.zeros((B, 2, 3, DIM), np.float32)},
        r"k: got shape \[3, 2, 3, 16\]; accepted: \[3, Sk, 2, 16\]",
    ),
    "few positions": (
        tables(np.zeros((47, 4))),
        r"rotary_cos: got shape \[47, 4\]; accepted: \[positions, R/2\] with at least 48 positions",
    ),
    "a wide rotation": (
        tables(np.zeros((48, 9))),
        r"rotary_cos: got shape \[48, 9\]; accepted: \[positions, R/2\] with R/2 of at most 8",
    ),
    "a rotation by integers": (
        {"rotary_cos": np.zeros((48, 4), np.int32), "rotary_sin": np.zeros((48, 4), np.float32)},
        "rotary_cos: got dtype int32; accepted: float32, float16, bfloat16, float64",
    ),
    "sizes of sines": (
        {"rotary_cos": np.zeros((48, 4), np.float32), "rotary_sin": np.zeros((48, 3), np.float32)},
        r"rotary_sin: got shape \[48, 3\]; accepted: \[48, 4\]",
    ),
    "sizes of heads": (
        {"k": np.zeros((B, 2, KV_HEADS, 8), np.float32)},
        r"k: got shape \[3, 2, 2, 8\]; accepted: \[3, Sk, 2, 16\]",
    ),
    "lengths": (
        {"cache_seqlens": LENGTHS[:2]},
        r"cache_seqlens: got shape \[2\]; accepted: \[3\] or a whole number",
    ),
    "a length of no dimensions": (
        {"cache_seqlens": np.array(3, np.int32)},
        r"cache_seqlens: got shape \[\]; accepted: \[3\] or a whole number",
    ),
    "lengths of floats": (
        {"cache_seqlens": LENGTHS.astype(np.float32)},
        "cache_seqlens: got dtype float32; accepted: int32",
    ),
    "left padding": ({"cache_leftpad": LENGTHS[:2]}, r"cache_leftpad: got shape \[2\]; accepted: \[3\]"),
    "left padding of floats": (
        {"cache_leftpad": LENGTHS.astype(np.float32)},
        "cache_leftpad: got dtype float32; accepted: int32",
    ),
    "pages of floats": (
        {"block_table": np.zeros((B, 6), np.float32)},
        "block_table: got dtype float32; accepted: int32",
    ),
    "no rows": (
        {"block_table": None, "cache_batch_idx": 1},
        r"cache_batch_idx: got 1 \(int\); accepted: a tensor \[3\]",
    ),
    "rows of int64": (
        {"block_table": None, "cache_batch_idx": LENGTHS.astype(np.int64)},
        "cache_batch_idx: got dtype int64; accepted: int32",
    ),
    "rows of floats": (
        {"block_table": None, "cache_batch_idx": LENGTHS.astype(np.float32)},
        "cache_batch_idx: got dtype float32; accepted: int32",
    ),
    "no values": ({"v_cache": None}, r"v_cache: got None \(NoneType\); accepted: a tensor \[32, 8, 2, Dv\]"),
    "pages of values": (
        {"v_cache": np.zeros((PAGES, PAGE + 1, KV_HEADS, DIM_V), np.float32), "k": None, "v": None},
        r"v_cache: got shape \[32, 9, 2, 24\]; accepted: \[32, 8, 2, Dv\]",
    ),
    "type of values": (
        {"v_cache": np.zeros((PAGES, PAGE, KV_HEADS, DIM_V), np.float16), "k": None, "v": None},
        "v_cache: got dtype float16; accepted: float32, the dtype of k_cache",
    ),
    "sizes of keys": (
        {"k_cache": np.zeros((PAGES, PAGE, KV_HEADS, 8), np.float32)},
        r"k_cache: got shape \[32, 8, 2, 8\]; accepted: \[P, page_size, Hk, 16\]",
    ),
    "bytes": (
        {"k_cache": np.zeros((PAGES, PAGE, KV_HEADS, DIM), np.uint8)},
        "k_cache: got dtype uint8; accepted: float32, float16, bfloat16, float8_e4m3fn",
    ),
    "type of new keys": (
        {"k": np.zeros((B, 2, KV_HEADS, DIM), np.float16)},
        "k: got dtype float16; accepted: float32, the dtype of k_cache",
    ),
    "type of new values": (
        {"v": np.zeros((B, 2, KV_HEADS, DIM_V), np.float16)},
        "v: got dtype float16; accepted: float32, the dtype of k_cache",
    ),
    "counts of new values": (
        {"v": np.zeros((B, 3, KV_HEADS, DIM_V), np.float32)},
        r"v: got shape \[3, 3, 2, 24\]; accepted: \[3, 2, 2, 24\]",
    ),
    "a window beside a rotation": (
        {"window_size": 4, **tables(np.zeros((48, 4)))},
        r"window_size: got 4 \(int\); accepted: a pair \(left, right\)",
    ),
    # Of the attention, whose arguments are right or wrong before anything is written.
    "softcap": ({"softcap": -1.0}, "softcap: got -1.0; accepted: a number >= 0"),
    "scale": ({"softmax_scale": float("inf")}, "softmax_scale: got inf; accepted: a finite number"),
    "slopes": (
        {"alibi_slopes": np.zeros((2, HEADS), np.float32)},
        r"alibi_slopes: got shape \[2, 4\]; accepted: \[Hq\] or \[S, Hq\] with Hq = 4 by q",
    ),
    "slopes of another type": (
        {"alibi_slopes": np.zeros(HEADS, np.float16)},
        "alibi_slopes: got dtype float16; accepted: float32",
    ),
    "sinks": (
        {"s_aux": np.zeros(3, np.float32)},
        r"s_aux: got shape \[3\]; accepted: \[Hq\] with Hq = 4 by q",
    ),
    "a window of three": (
        {"window_size": (1, 2, 3)},
        r"window_size: got \(1, 2, 3\); accepted: a pair \(left, right\)",
    ),
    "half a key": ({"window_size": (3.5, 0)}, r"window_size: got \(3.5, 0\); accepted: a pair"),
    "query heads": (
        {"q": np.zeros((B, 2, 3, DIM), np.float32)},
        "q: got 3 heads; accepted: a multiple of the 2 heads of k_cache",
    ),
    "type of queries": (
        {"q": np.zeros((B, 2, HEADS, DIM), np.float16)},
        "k_cache: got dtype float32; accepted: float16, float8_e4m3fn, float8_e5m2 with a float16 q",
    ),
    "queries of integers": (
        {"q": np.zeros((B, 2, HEADS, DIM), np.int32)},
        "q: got dtype int32; accepted: float32",
    ),
    "causal": ({"causal": None}, r"causal: got None \(NoneType\); accepted: bool"),
}


@pytest.mark.frontends("torch", "jax", "jax_jit")
@pytest.mark.parametrize("case", WRONG)
def test_errors(frontend: Frontend, rng: np.random.Generator, case: str) -> None:
    more, message = WRONG[case]
    given = {**paged(rng, 2, **new(rng, 2), cache_seqlens=LENGTHS), **more}
    with pytest.raises((TypeError, ValueError), match=f"^flash_attn_with_kvcache: {message}"):
        frontend.run("flash_attn_with_kvcache", given)


@pytest.mark.frontends("torch", "lazy", "torchax", "torchtpu")
# torchax makes int32 of int64, as JAX does.
@pytest.mark.parametrize("case", [case for case in WRONG if case != "rows of int64"])
def test_a_wrong_call_writes_nothing(frontend: TorchFrontend, rng: np.random.Generator, case: str) -> None:
    given = {**paged(rng, 2, **new(rng, 2), cache_seqlens=LENGTHS), **WRONG[case][0]}
    tensors = {name: frontend.tensor(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
    with pytest.raises((TypeError, ValueError), match=r"^flash_attn_with_kvcache: "):
        frontend.call(
            frontend.fx.flash_attn_with_kvcache,
            {name: tensors[name] for name in tensors if isinstance(given[name], np.ndarray)},
            {name: x for name, x in given.items() if not isinstance(x, np.ndarray)},
        )
    for name in ("k_cache", "v_cache"):
        if given[name] is not None:
            assert_same_bits(frontend.array(tensors[name]), given[name], name)


def appending(rng: np.random.Generator, **more: Any) -> Arguments:
    return {
        "append_key": normal(rng, 4, KV_HEADS, DIM),
        "append_value": normal(rng, 4, KV_HEADS, DIM_V),
        "batch_indices": np.array([0, 0, 1, 1], np.int32),
        "positions": np.array([0, 1, 3, 9], np.int32),
        "paged_kv_cache": (normal(rng, 6, PAGE, KV_HEADS, DIM), normal(rng, 6, PAGE, KV_HEADS, DIM_V)),
        "kv_indices": np.array([3, 1, 4], np.int32),
        "kv_indptr": np.array([0, 1, 3], np.int32),
        **more,
    }


WRONG_APPENDS: dict[str, tuple[Arguments, str]] = {
    **{
        f"{name} of {dtype.__name__}": (
            {name: np.zeros(3 if name.startswith("kv") else 4, dtype)},
            rf"{name}: got dtype {np.dtype(dtype).name}; accepted: int32, int64",
        )
        for name in ("batch_indices", "positions", "kv_indices", "kv_indptr")
        for dtype in (np.float32, np.bool_, np.int8)
    },
    "no offsets": ({"kv_indptr": np.zeros(0, np.int32)}, r"kv_indptr: got shape \[0\]; accepted: \[B\+1\]"),
    "values": (
        {"paged_kv_cache": (np.zeros((6, PAGE, KV_HEADS, DIM), np.float32),) * 2},
        r"paged_kv_cache\[1\]: got shape \[6, 8, 2, 16\]; accepted: \[6, 8, 2, 24\]",
    ),
    "keys": (
        {"paged_kv_cache": (np.zeros((6, PAGE, 3, DIM), np.float32),) * 2},
        r"paged_kv_cache\[0\]: got shape \[6, 8, 3, 16\]; accepted: \[P, B, 2, 16\]",
    ),
    "type": (
        {
            "append_key": np.zeros((4, KV_HEADS, DIM), np.float16),
            "append_value": np.zeros((4, 2, 24), np.float16),
        },
        r"paged_kv_cache\[0\]: got dtype float32; accepted: float16, the dtype of append_key",
    ),
    "type of the values": (
        {"append_value": np.zeros((4, KV_HEADS, DIM_V), np.float16)},
        "append_value: got dtype float16; accepted: float32, the dtype of append_key",
    ),
    "counts": (
        {"append_value": np.zeros((3, KV_HEADS, DIM_V), np.float32)},
        r"append_value: got shape \[3, 2, 24\]; accepted: \[4, 2, Dv\]",
    ),
    "bytes": (
        {"paged_kv_cache": tuple(np.zeros((6, PAGE, KV_HEADS, d), np.uint8) for d in (DIM, DIM_V))},
        r"paged_kv_cache\[0\]: got dtype uint8; accepted: float32",
    ),
}


@pytest.mark.frontends("torch", "jax", "jax_jit")
@pytest.mark.parametrize("case", WRONG_APPENDS)
def test_errors_of_appending(frontend: Frontend, rng: np.random.Generator, case: str) -> None:
    more, message = WRONG_APPENDS[case]
    with pytest.raises((TypeError, ValueError), match=f"^append_paged_kv_cache: {message}"):
        frontend.run("append_paged_kv_cache", appending(rng, **more), ("paged_kv_cache",))


@pytest.mark.frontends("torch")
def test_tensors_of_others_are_refused(frontend: TorchFrontend, rng: np.random.Generator) -> None:
    """Those of NumPy, and those on another device."""
    given = {
        "flash_attn_with_kvcache": dense(
            rng,
            **new(rng, 1),
            **tables(np.zeros((SIZE, 4))),
            cache_seqlens=LENGTHS,
            cache_batch_idx=LENGTHS,
            cache_leftpad=LENGTHS,
            alibi_slopes=np.zeros(HEADS, np.float32),
            s_aux=np.zeros(HEADS, np.float32),
        ),
        "append_paged_kv_cache": appending(rng),
    }
    for function, arguments in given.items():
        first, *names = (name for name, x in arguments.items() if isinstance(x, np.ndarray))
        tensors = {name: frontend.tensor(arguments[name]) for name in (first, *names)}
        if function == "append_paged_kv_cache":
            tensors["paged_kv_cache"] = tuple(map(frontend.tensor, arguments["paged_kv_cache"]))
        for name in names:
            for other, got in (
                (arguments[name], r"(numpy\.ndarray|array\(.*\)); accepted: a "),
                (
                    tensors[name].to("meta"),
                    f"a tensor on meta; accepted: {tensors[first].device}, the device of ",
                ),
            ):
                with pytest.raises((TypeError, ValueError)) as error:
                    getattr(frontend.fx, function)(**{**tensors, name: other})
                message = str(error.value)
                assert re.match(f"{function}: {name}: got {got}", message, re.DOTALL), message


@pytest.mark.frontends("jax", "jax_jit")
@pytest.mark.parametrize("function", ["flash_attn_with_kvcache", "append_paged_kv_cache"])
def test_numpy_constants_in_a_program(frontend: JaxFrontend, rng: np.random.Generator, function: str) -> None:
    given = appending(rng)
    names = ("kv_indices", "kv_indptr", "batch_indices")
    if function == "flash_attn_with_kvcache":
        given = paged(rng, **new(rng, 1), **tables(np.ones((48, 4))), cache_seqlens=LENGTHS, causal=True)
        names = ("rotary_cos", "rotary_sin", "block_table")
    constants = {name: given.pop(name) for name in names}
    numbers = {name: given.pop(name) for name in ("causal",) if name in given}
    arrays = frontend.jax.tree.map(frontend.jax.numpy.asarray, given)

    def call(arrays: Any, constants: Any) -> Any:
        return getattr(frontend.fx, function)(**arrays, **constants, **numbers)

    got = frontend.jax.jit(lambda arrays: call(arrays, constants))(arrays)
    expected = frontend.jax.jit(call)(arrays, constants)
    for x, y in zip(flat(got), flat(expected), strict=True):
        assert_same_bits(np.asarray(x), np.asarray(y), function)


@pytest.mark.frontends("jax", "jax_jit")
@pytest.mark.parametrize("length", [2**31 + 8, 2**32 + 1, -(2**32)])
def test_wide_integers_do_not_wrap_around(
    frontend: JaxFrontend, rng: np.random.Generator, length: int
) -> None:
    """They count as the nearest that 32 bits hold, as those of the operations do."""
    given = frontend.jax.tree.map(frontend.jax.numpy.asarray, dense(rng))
    bounds = np.iinfo(np.int32)
    nearest = np.full(B, np.clip(length, bounds.min, bounds.max), np.int32)

    def call(lengths: np.ndarray) -> Any:
        function = frontend.fx.flash_attn_with_kvcache
        if frontend.name == "jax_jit":
            return frontend.jax.jit(lambda arrays: function(**arrays, cache_seqlens=lengths))(given)
        return function(**given, cache_seqlens=lengths)

    assert_same_bits(np.asarray(call(np.full(B, length))), np.asarray(call(nearest)), "out")


@pytest.mark.frontends("torch", "jax", "jax_jit")
def test_a_cache_without_places(frontend: Frontend, rng: np.random.Generator) -> None:
    """Nothing is written, and there is nothing to see."""
    given = dense(rng, **new(rng, 1), cache_seqlens=np.zeros(B, np.int32))
    given |= {name: given[name][:, :0] for name in ("k_cache", "v_cache")}
    out, *_ = flat(frontend.run("flash_attn_with_kvcache", given))
    assert not out.any()
    pages = tuple(np.zeros((6, 0, KV_HEADS, d), np.float32) for d in (DIM, DIM_V))
    frontend.run("append_paged_kv_cache", appending(rng, paged_kv_cache=pages), ("paged_kv_cache",))


@pytest.mark.frontends("torch", "jax")
def test_positions_of_a_dense_cache(frontend: Frontend, rng: np.random.Generator) -> None:
    """A table as long as the cache is taken, one that is shorter is refused."""
    given = dense(rng, **new(rng, 1), cache_seqlens=LENGTHS)
    frontend.run("flash_attn_with_kvcache", {**given, **tables(np.zeros((SIZE, 4)))})
    with pytest.raises(
        ValueError, match=rf"^flash_attn_with_kvcache: rotary_cos: .* at least {SIZE} positions"
    ):
        frontend.run("flash_attn_with_kvcache", {**given, **tables(np.zeros((SIZE - 1, 4)))})


@pytest.mark.frontends("torch")
def test_one_graph(frontend: TorchFrontend, rng: np.random.Generator) -> None:
    """The cache is updated in place in a compiled program, too."""
    torch = frontend.torch
    torch._dynamo.reset()
    given, _ = calls(rng)["append to pages"]
    tensors = {name: frontend.tensor(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
    pointer = tensors["k_cache"].data_ptr()
    compiled = torch.compile(frontend.fx.flash_attn_with_kvcache, fullgraph=True)
    out = compiled(**tensors)
    expected = expected_of(given, None)
    np.testing.assert_allclose(frontend.array(out), expected[0], atol=2e-5, rtol=1e-4)
    np.testing.assert_allclose(frontend.array(tensors["k_cache"]), expected[2], atol=2e-5, rtol=1e-4)
    assert tensors["k_cache"].data_ptr() == pointer


CHECKED = """
import torch

import flashxla.torch as fx


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


q, cache = torch.zeros(2, 1, 2, 16), torch.zeros(4, 8, 2, 16)
new = {"k": torch.zeros(2, 1, 2, 16), "v": torch.zeros(2, 1, 2, 16)}
for more in (
    {"cache_seqlens": int32(3, 8), **new},
    {"cache_seqlens": int32(3, 9)},
    {"cache_seqlens": int32(3, 7), "cache_batch_idx": int32(0, 9), **new},
    {"cache_seqlens": int32(3, 7), "block_table": int32(0, 9)[:, None], **new},
    {"cache_seqlens": int32(3, 7), "cache_leftpad": int32(-1, 0)},
):
    try:
        fx.flash_attn_with_kvcache(q, cache, cache, **more)
    except ValueError as error:
        print(error)
"""


@pytest.mark.frontends("torch")
def test_check_mode_names_its_arguments(frontend: TorchFrontend) -> None:
    """A cache that is full, too: what has no place is not written, and is an error where all are."""
    environment = {**os.environ, "FLASHXLA_CHECK": "1"}
    process = subprocess.run(
        [sys.executable, "-c", CHECKED], env=environment, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr
    starts = (
        "(cache_seqlens + Sk)[1] = 9: ",
        "cache_seqlens[1] = 9: ",
        "cache_batch_idx[1, 0] = 9: ",
        "block_table[1, 0] = 9: ",
        "cache_leftpad[0] = -1",
    )
    for line, start in zip(process.stdout.splitlines(), starts, strict=True):
        assert line.startswith(f"flash_attn_with_kvcache: {start}"), line
