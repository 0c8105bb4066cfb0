"""What JAX users give: wide integers of the host, pairs of any kind, weak types, sizes that are not known."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import flashxla.jax as fx

KEY = np.ones((2, 1, 8), np.float32)
CACHE = np.zeros((2, 4, 1, 8), np.float32)
BATCH = {
    "context_lens": [3, 3],
    "block_tables": [[0], [1]],
    "query_start_loc": [0, 1, 2],
    "num_seqs": 2,
    "scale": 0.1,
}


class Pair(NamedTuple):
    keys: Any
    values: Any


@pytest.mark.parametrize("kind", [np.array, list], ids=["numpy", "list"])
@pytest.mark.parametrize("x64", [False, True], ids=["", "x64"])
@pytest.mark.parametrize("slot", [-(2**63), -(2**40), 2**32 + 5, 2**40, 2**63 - 1])
def test_slots_of_64_bits_do_not_wrap_around(slot: int, x64: bool, kind: Any) -> None:
    """Modulo 2^32 they would be slots that exist."""
    with jax.enable_x64(x64):
        keys, values = fx.reshape_and_cache_flash(KEY, 2 * KEY, CACHE, CACHE, kind([slot, 5]))
    written = np.asarray(keys).reshape(8, 8).any(axis=1)
    assert written.tolist() == [False] * 5 + [True] + [False] * 2
    assert np.asarray(values).sum() == 2 * np.asarray(keys).sum() == 16


def test_lengths_of_64_bits_do_not_wrap_around() -> None:
    cache = np.random.default_rng(0).normal(size=(2, 4, 2, 8)).astype(np.float32)
    lens = np.array([2**32 + 1, 3])
    clipped = np.array([2**31 - 1, 3], np.int32)
    query = KEY.repeat(2, axis=1)
    got, expected, wrapped = (
        fx.paged_attention(query, cache, **{**BATCH, "context_lens": x})
        for x in (lens, clipped, np.array([1, 3], np.int32))
    )
    assert (got == expected).all() and not (got == wrapped).all()


@pytest.mark.parametrize("kind", [tuple, list, Pair._make], ids=["tuple", "list", "NamedTuple"])
def test_a_pair_comes_back_as_it_was_given(kind: Any) -> None:
    """So that it can be the carry of a loop."""
    pair = kind((CACHE, CACHE))
    out, given = fx.ragged_paged_attention(KEY, KEY, KEY, pair, **BATCH)
    assert type(given) is type(pair)
    packed, given = fx.ragged_paged_attention_qkvpacked(KEY.repeat(3, axis=1), kv_cache=pair, **BATCH)
    assert type(given) is type(pair) and (packed == out).all()

    def step(caches: Any, _: Any) -> Any:
        out, caches = fx.ragged_paged_attention(KEY, KEY, KEY, caches, **BATCH)
        return caches, out

    caches, _ = jax.lax.scan(step, jax.tree.map(jax.numpy.asarray, pair), None, length=2)
    assert type(caches) is type(pair)


def test_numbers_of_python_under_x64() -> None:
    cache = np.ones((2, 4, 2, 8), np.float32)

    def attend(scale: Any) -> Any:
        return fx.paged_attention(KEY, cache, **BATCH, k_scale=scale)

    with jax.enable_x64(True):
        assert attend(2.0).dtype == jax.jit(attend)(2.0).dtype == np.float32
        lens = np.array([3, 3])
        with pytest.raises(
            TypeError, match="paged_attention: context_lens: got dtype int64; accepted: int32"
        ):
            fx.paged_attention(KEY, cache, **{**BATCH, "context_lens": lens})


@pytest.mark.parametrize(
    "given", [[0, 2**70], [[0], [1, 2]], object()], ids=["more than 64 bits", "ragged", "an object"]
)
def test_what_is_no_array_is_named(given: Any) -> None:
    with pytest.raises(
        TypeError, match=r"flash_attn_varlen_func: cu_seqlens_q: got .*; accepted: an array of int32"
    ):
        fx.flash_attn_varlen_func(KEY, KEY, KEY, 2, given, 2, [0, 2])


def test_sizes_that_are_not_known_are_refused() -> None:
    (tokens,) = jax.export.symbolic_shape("t")
    x = jax.ShapeDtypeStruct((tokens, 1, 8), np.float32)
    offsets = jax.ShapeDtypeStruct((2,), np.int32)

    def attend(x: Any, offsets: Any) -> Any:
        return fx.flash_attn_varlen_func(x, x, x, 4, offsets, 4, offsets)

    with pytest.raises(
        ValueError, match=r"flash_attn_varlen_func: q: got shape \[t, 1, 8\]; accepted: sizes that"
    ):
        jax.export.export(jax.jit(attend), disabled_checks=fx.export_checks())(x, offsets)


def test_other_platforms_are_refused() -> None:
    """A program for one would call the library for CPUs."""
    x, offsets = jax.ShapeDtypeStruct((4, 1, 8), np.float32), jax.ShapeDtypeStruct((2,), np.int32)

    def attend(x: Any, offsets: Any) -> Any:
        return fx.flash_attn_varlen_func(x, x, x, 4, offsets, 4, offsets)

    program = jax.export.export(jax.jit(attend), platforms=["tpu"], disabled_checks=fx.export_checks())
    with pytest.raises(NotImplementedError, match="platform tpu"):
        program(x, offsets)
