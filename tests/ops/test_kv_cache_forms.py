"""Functions of other libraries over a KV cache, against a float64 reference of their own."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from tests import reference
from tests.checks import DTYPES, TOLERANCE, assert_close, assert_same_bits
from tests.frontends import Frontend, TorchFrontend

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
    """Rotary embedding as a product of complex numbers. x: [S, H, D]; angles: [positions, R / 2]; positions: [S]."""
    half = angles.shape[1]
    out = x.astype(np.float64)
    first, second = slice(half), slice(half, 2 * half)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    turned = (out[..., first] + 1j * out[..., second]) * np.exp(1j * angles[positions])[:, None]
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


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
        query, new = given["q"][b].astype(np.float64), 0
        table, size = [given["cache_batch_idx"][b] if "cache_batch_idx" in given else b], caches[0].shape[1]
        if "block_table" in given:
            table = given["block_table"][b]
        places = [(page, i) for page in table for i in range(size)]
        if "k" in given:
            parts = [given["k"][b].astype(np.float64), given["v"][b].astype(np.float64)]
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
        r"v: got shape \[3, 2, 2, 24\]; accepted: \[3, 2, 3, Dv\]",
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
        r"k: got shape \[3, 2, 2, 8\]; accepted: \[3, Sk, Hk, 16\]",
    ),
    "lengths": ({"cache_seqlens": LENGTHS[:2]}, r"cache_seqlens: got shape \[2\]; accepted: \[3\]"),
}


@pytest.mark.frontends("torch", "jax")
@pytest.mark.parametrize("case", WRONG)
def test_errors(frontend: Frontend, rng: np.random.Generator, case: str) -> None:
    more, message = WRONG[case]
    given = {**paged(rng, 2, **new(rng, 2), cache_seqlens=LENGTHS), **more}
    with pytest.raises((TypeError, ValueError), match=f"^flash_attn_with_kvcache: {message}"):
        frontend.run("flash_attn_with_kvcache", given)


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
