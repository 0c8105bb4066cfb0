"""batch_invariant=True: the bits of a text do not depend on what else is in the batch, nor on how it is computed.

A text computed whole and alone, with dense keys, is what everything else is held against, bit by bit: out and LSE.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import flashxla
from flashxla import native
from flashxla.ops.op import Call, Op
from tests import reference
from tests.batches import Arguments, Case, nans, normal
from tests.checks import DTYPES, assert_attention, assert_same_bits
from tests.frontends import Frontend, TorchFrontend
from tests.ops.engines import rounding_of_weights

Array = np.ndarray
Results = tuple[Array, Array]

# Texts of so many tokens; the first is the one whose bits are compared. It has several kv tiles of every kernel.
LENS = ((300, 300), (41, 41), (130, 130))

CASES = [
    Case(LENS),
    Case(LENS, heads=(6, 2), dim=40, window=(50, -1)),
    Case(LENS, heads=(2, 2), dim=256, softcap=3.0, alibi="H", window=(33, -1)),
    Case(LENS, heads=(8, 1), dim=128, sinks="f32", leftpad=True),
    Case(LENS, heads=(8, 2), dim=128, dtype="bf16"),
    Case(LENS, heads=(40, 1), dim=64, dtype="bf16", window=(70, -1), sinks="bf16"),
    Case(LENS, heads=(3, 3), dim=72, dtype="bf16", softcap=2.0, alibi="H", leftpad=True),
    Case(LENS, dim=64, dtype="f16", window=(128, -1), leftpad=True),
    Case(LENS, heads=(4, 1), dim=46, dtype="f16", alibi="H"),
    Case(LENS, heads=(8, 2), dim=128, dtype="bf16", cache="e4m3", descale="H"),
    Case(LENS, heads=(4, 4), dim=64, dtype="e5m2", cache="e5m2", window=(21, -1), softcap=4.0),
    Case(LENS, heads=(6, 2), dim=128, dtype="e4m3", cache="e4m3", descale="H", window=(60, -1)),
    Case(LENS, dim=192, dtype="f16", cache="e4m3", softcap=9.0, leftpad=True),
    Case(LENS, dim=64, cache="u8:e4m3", descale="H"),
    Case(LENS, dim=192, v_dim=128, dtype="bf16", leftpad=True),
    Case(LENS, heads=(8, 2), dim=100, dtype="bf16", window=(40, -1)),
    Case(LENS, heads=(4, 1), dim=200, dtype="e5m2", cache="e4m3", descale="H"),
    Case(LENS, heads=(16, 1), dim=576, v_dim=512, dtype="bf16"),
    Case(LENS, dim=128, dtype="bf16", causal=False),
    Case(LENS, dim=64, dtype="bf16", causal=False, window=(17, 9), leftpad=True),
    Case(LENS, dim=96, causal=False, window=(40, 3), softcap=5.0),
    Case(LENS, heads=(4, 2), dim=256, dtype="e4m3", cache="e4m3", descale="H"),
]
EVERYWHERE = [CASES[i] for i in (2, 4, 9, 17)]  # through every front end


class Text(NamedTuple):
    """Queries, keys and values of all tokens. The first `padding` keys are not seen."""

    q: Array
    k: Array
    v: Array
    padding: int


class Piece(NamedTuple):
    """Queries [begin, end) of a text, which has the keys before `end` then."""

    text: int
    begin: int
    end: int


def texts_of(rng: np.random.Generator, case: Case) -> list[Text]:
    element = DTYPES[case.dtype if case.cache == "same" else case.cache.removeprefix("u8:")]
    texts = []
    for length, _ in case.lens:
        k, v = (normal(rng, (length, case.heads[1], dim), element) for dim in case.dims)
        q = normal(rng, (length, case.heads[0], case.dim), DTYPES[case.dtype])
        texts.append(Text(q, k, v, int(rng.integers(1, length // 2)) if case.leftpad else 0))
    return texts


def options_of(rng: np.random.Generator, case: Case) -> Arguments:
    """The arguments that all calls of a case have."""
    options: Arguments = {
        "causal": case.causal,
        "window_size": case.window,
        "softcap": case.softcap,
        "kv_cache_dtype": case.kv_cache_dtype,
        "return_softmax_lse": True,
        "batch_invariant": True,
    }
    if case.alibi:
        options["alibi_slopes"] = rng.uniform(0.01, 0.5, case.heads[0]).astype(np.float32)
    if case.sinks:
        options["s_aux"] = normal(rng, (case.heads[0],), DTYPES[case.sinks])
    if case.descale:
        for name in ("q_descale", "k_descale", "v_descale"):
            options[name] = rng.uniform(0.25, 2.0, case.heads[1]).astype(np.float32)
    return options


def stored(case: Case, array: Array) -> Array:
    """Keys as a case's calls have them."""
    return array.view(np.uint8) if case.cache.startswith("u8:") else array


def queries_of(texts: list[Text], pieces: list[Piece]) -> Arguments:
    lengths = [end - begin for _, begin, end in pieces]
    arguments: Arguments = {
        "q": np.concatenate([texts[text].q[begin:end] for text, begin, end in pieces]),
        "cu_seqlens_q": np.cumsum([0, *lengths]).astype(np.int32),
        "max_seqlen_q": max(lengths),
        "max_seqlen_k": max(end for *_, end in pieces),
    }
    if any(text.padding for text in texts):
        arguments["leftpad_k"] = np.array([texts[piece.text].padding for piece in pieces], np.int32)
    return arguments


def dense(case: Case, texts: list[Text], pieces: list[Piece]) -> Arguments:
    """The arguments of a call of these pieces, each with keys of its own."""
    keys, values = (np.concatenate([texts[text][i][:end] for text, _, end in pieces]) for i in (1, 2))
    offsets = np.cumsum([0, *(end for *_, end in pieces)]).astype(np.int32)
    keys, values = stored(case, keys), stored(case, values)
    return queries_of(texts, pieces) | {"k": keys, "v": values, "cu_seqlens_k": offsets}


def paged(rng: np.random.Generator, case: Case, texts: list[Text], pieces: list[Piece]) -> Arguments:
    """The same with pages that the pieces of a text share.

    Keys that no query sees hold NaN or have no page: padding, tails of pages, pages before the window.
    """
    size = int(rng.choice([1, 3, 16, 17, 64]))
    layout = str(rng.choice(["NHD", "HND"]))
    counts = [-(-len(text.k) // size) for text in texts]
    blocks = np.split(rng.permutation(sum(counts) + 2), np.cumsum(counts))
    caches = []
    for i, dim in zip((1, 2), case.dims, strict=True):
        cache = nans((sum(counts) + 2, size, case.heads[1], dim), texts[0][i].dtype)
        for text, pages in zip(texts, blocks, strict=False):
            for position in range(text.padding, len(text.k)):
                cache[pages[position // size], position % size] = text[i][position]
        cache = stored(case, cache)
        caches.append(np.ascontiguousarray(cache.swapaxes(1, 2)) if layout == "HND" else cache)
    table = rng.integers(-3, 3, (len(pieces), max(counts) + int(rng.integers(0, 4))), np.int32)
    for row, (text, begin, end) in zip(table, pieces, strict=True):
        row[: -(-end // size)] = blocks[text][: -(-end // size)]
        if case.window[0] >= 0:
            row[: max(begin - case.window[0], 0) // size] = -1
    lengths = np.array([piece.end for piece in pieces], np.int32)
    arguments = queries_of(texts, pieces)
    arguments |= {
        "k": caches[0],
        "v": caches[1],
        "block_table": table,
        "seqused_k": lengths,
        "layout": layout,
    }
    return arguments


def padded(rng: np.random.Generator, arguments: Arguments) -> Arguments:
    """With tokens outside every sequence, and sequences that do not exist."""
    seqs = len(arguments["cu_seqlens_q"]) - 1
    more = int(rng.integers(1, 4))
    q = arguments["q"]
    result = arguments | {
        "q": np.concatenate([q, nans((int(rng.integers(1, 70)), *q.shape[1:]), q.dtype)]),
        "num_seqs": np.array([seqs], np.int32),
        "max_seqlen_q": arguments["max_seqlen_q"] + int(rng.integers(0, 90)),
        "max_seqlen_k": arguments["max_seqlen_k"] + int(rng.integers(0, 900)),
    }
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table", "leftpad_k"):
        if (array := arguments.get(name)) is not None:
            garbage = rng.integers(-(2**31), 2**31, (more, *array.shape[1:]))
            result[name] = np.concatenate([array, garbage]).astype(np.int32)
    return result


def attend(frontend: Frontend, arguments: Arguments, pieces: list[Piece]) -> Iterator[tuple[Piece, Results]]:
    """Make a call, which must be right; what it computed of each piece."""
    out, lse = frontend.flash_attn_varlen_func(**arguments)
    assert lse is not None
    expected = reference.flash_attn_varlen_func(**arguments)
    rounding = rounding_of_weights(frontend, "flash_attn_varlen_func", arguments)
    assert_attention(out, lse, expected, arguments["q"].dtype, rounding)
    for piece, start in zip(pieces, arguments["cu_seqlens_q"], strict=False):
        rows = slice(start, start + piece.end - piece.begin)
        yield piece, (out[rows], lse[:, rows])


def alone(frontend: Frontend, case: Case, texts: list[Text], options: Arguments) -> Results:
    """The first text, computed whole and alone."""
    whole = [Piece(0, 0, len(texts[0].q))]
    ((_, results),) = attend(frontend, dense(case, texts, whole) | options, whole)
    return results


def assert_same(piece: Piece, got: Results, whole: Results) -> None:
    rows = slice(piece.begin, piece.end)
    assert_same_bits(got[0], whole[0][rows], f"out of {piece}")
    assert_same_bits(got[1], whole[1][:, rows], f"LSE of {piece}")


def chunks(rng: np.random.Generator, case: Case, text: int) -> list[Piece]:
    """A text in pieces. Without a causal mask a query sees keys behind it, which a chunk before has not: last parts."""
    length, _ = case.lens[text]
    cuts = np.unique(rng.integers(1, length, 6)).tolist()
    if case.causal:
        return [Piece(text, *ends) for ends in zip([0, *cuts], [*cuts, length], strict=True)]
    return [Piece(text, begin, length) for begin in cuts]


def tokens(rng: np.random.Generator, case: Case, text: int) -> list[Piece]:
    """Decoding: pieces of one token."""
    length, _ = case.lens[text]
    if not case.causal:
        return [Piece(text, length - 1, length)]
    return [Piece(text, int(i), int(i) + 1) for i in rng.permutation(length)[:40]]


def wholes(rng: np.random.Generator, case: Case) -> list[Piece]:
    return [Piece(int(text), 0, case.lens[text][0]) for text in rng.permutation(len(case.lens))]


def pieces_of(rng: np.random.Generator, case: Case, way: str) -> list[Piece]:
    if way in ("alone in a padded batch", "alone in pages"):
        return [Piece(0, 0, case.lens[0][0])]
    if way == "with others":
        return wholes(rng, case)
    if way == "in chunks":
        return chunks(rng, case, 0)
    if way == "decoded":
        return tokens(rng, case, 0)
    assert way == "all at once"
    mixed = wholes(rng, case) + [
        piece for text in range(len(case.lens)) for cut in (chunks, tokens) for piece in cut(rng, case, text)
    ]
    return [mixed[i] for i in rng.permutation(len(mixed))]


WAYS = ["alone in a padded batch", "alone in pages", "with others", "in chunks", "decoded", "all at once"]


def check(frontend: Frontend, rng: np.random.Generator, case: Case, way: str) -> None:
    texts, options = texts_of(rng, case), options_of(rng, case)
    whole = alone(frontend, case, texts, options)
    pieces = pieces_of(rng, case, way)
    in_pages = "pages" in way or way == "all at once"
    arguments = paged(rng, case, texts, pieces) if in_pages else dense(case, texts, pieces)
    if "padded" in way or way == "all at once":
        arguments = padded(rng, arguments)
    compared = 0
    for piece, got in attend(frontend, arguments | options, pieces):
        if piece.text == 0:
            assert_same(piece, got, whole)
            compared += 1
    assert compared


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits(frontend: Frontend, rng: np.random.Generator, case: Case, way: str) -> None:
    check(frontend, rng, case, way)


@pytest.mark.parametrize("case", EVERYWHERE, ids=str)
def test_bits_in_every_front_end(frontend: Frontend, rng: np.random.Generator, case: Case) -> None:
    check(frontend, rng, case, "all at once")


# With so many keys threads would share those of a token, or of a chunk.
LONG = [
    Case(((1600, 1600),), heads=(2, 1), dim=64, dtype="f32"),
    Case(((1600, 1600),), heads=(1, 1), dim=128, dtype="bf16", window=(1100, -1)),
    Case(((1600, 1600),), heads=(4, 1), dim=64, dtype="bf16", cache="e4m3", causal=False),
]


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("case", LONG, ids=str)
def test_threads(frontend: TorchFrontend, rng: np.random.Generator, case: Case) -> None:
    """Their number does not matter on a CPU, nor on a GPU that of the multiprocessors that could share a token."""
    before = frontend.torch.get_num_threads()
    texts, options = texts_of(rng, case), options_of(rng, case)
    whole = alone(frontend, case, texts, options)
    length, _ = case.lens[0]
    last = [[Piece(0, length - queries, length)] for queries in (1, 3, 60)]
    try:
        for threads in (1, 2, 7):
            frontend.torch.set_num_threads(threads)
            for pieces in [*last, chunks(rng, case, 0)]:
                for piece, got in attend(frontend, dense(case, texts, pieces) | options, pieces):
                    assert_same(piece, got, whole)
    finally:
        frontend.torch.set_num_threads(before)


# So many keys that thread blocks of a GPU share those of a token, if there are few of them. The second text is one of
# many others.
MANY_LENS = ((9000, 9000), (20, 20))
MANY_KEYS = [
    Case(MANY_LENS, heads=(8, 2), dim=128, dtype="bf16"),
    Case(MANY_LENS, heads=(4, 4), dim=64, dtype="f16", window=(5000, -1)),
    Case(MANY_LENS, heads=(2, 1), dim=96, dtype="bf16", causal=False, sinks="f32"),
    Case(MANY_LENS, heads=(16, 1), dim=256, dtype="bf16", leftpad=True),
    Case(MANY_LENS, heads=(3, 3), dim=192, v_dim=128, dtype="f16", softcap=5.0),
    Case(MANY_LENS, heads=(4, 1), dim=128, dtype="bf16", cache="e4m3", descale="H"),
    Case(MANY_LENS, heads=(4, 2), dim=128, dtype="e4m3", cache="e4m3", window=(2100, -1)),
    Case(MANY_LENS, heads=(2, 2), dim=128, dtype="bf16", alibi="H"),
    Case(MANY_LENS, heads=(2, 1), dim=64, dtype="f32"),
    Case(((150000, 150000), (20, 20)), heads=(2, 1), dim=64, dtype="bf16"),
    Case(MANY_LENS, heads=(4, 2), dim=100, dtype="bf16"),
    Case(MANY_LENS, heads=(4, 4), dim=36, dtype="f16", window=(5000, -1)),
    Case(MANY_LENS, heads=(8, 2), dim=120, dtype="bf16", cache="e4m3", alibi="H"),
]
LAST = 150  # queries of the first text


def last_pieces(rng: np.random.Generator, case: Case, way: str) -> list[Piece]:
    """Some of the last queries of the first text, and of others."""
    length, start = case.lens[0][0], case.lens[0][0] - LAST
    begins = [start + int(i) for i in rng.permutation(LAST)]
    others = [Piece(1, 19, 20)]
    if way == "one token":
        return [Piece(0, length - 1, length)]
    if way == "some tokens":
        return [Piece(0, i, i + 1 if case.causal else length) for i in begins[:4]]
    if way == "a chunk, with others":
        end = max(begins[:2]) + 1 if case.causal else length
        return [*others, Piece(0, min(begins[:2]), end), *others]
    assert way == "a token, with many others"
    return [*others * 100, Piece(0, length - 1, length)]


@pytest.mark.gpu_engine
@pytest.mark.frontends("torch")
@pytest.mark.parametrize(
    "way", ["one token", "some tokens", "a chunk, with others", "a token, with many others"]
)
@pytest.mark.parametrize("case", MANY_KEYS, ids=str)
def test_many_keys(frontend: Frontend, rng: np.random.Generator, case: Case, way: str) -> None:
    """How many thread blocks share the keys does not matter."""
    texts, options = texts_of(rng, case), options_of(rng, case)
    length, start = len(texts[0].q), len(texts[0].q) - LAST
    all_last = [Piece(0, start, length)]
    ((_, whole),) = attend(frontend, dense(case, texts, all_last) | options, all_last)
    pieces = last_pieces(rng, case, way)
    calls = [paged(rng, case, texts, pieces)]
    calls.append(padded(rng, calls[0]) if len(pieces) < 100 else dense(case, texts, pieces))
    for arguments in calls:
        for piece, got in attend(frontend, arguments | options, pieces):
            if piece.text == 0:
                assert_same(Piece(0, piece.begin - start, piece.end - start), got, whole)


@pytest.mark.frontends("torch")
@pytest.mark.parametrize(
    "case", [Case(LENS, heads=(32, 2), dim=256, dtype=d) for d in ("f32", "bf16")], ids=str
)
def test_a_later_value_that_is_not_finite(frontend: Frontend, rng: np.random.Generator, case: Case) -> None:
    """It changes no bit of the queries before it."""
    if frontend.device != "cpu":
        pytest.skip("tensor cores multiply hidden values by 0")
    texts, options = texts_of(rng, case), options_of(rng, case)
    whole = alone(frontend, case, texts, options)
    infinite = 255  # the last of its kv tile
    texts[0].v[infinite:, :, ::3] = np.inf
    for pieces in ([Piece(0, 0, 300)], [Piece(0, 150, 258), Piece(0, 161, 300)]):
        out, lse = frontend.flash_attn_varlen_func(**dense(case, texts, pieces) | options)
        assert lse is not None
        start = 0
        for text, begin, end in pieces:
            rows = slice(start, start + infinite - begin)
            assert_same(Piece(text, begin, infinite), (out[rows], lse[:, rows]), whole)
            start += end - begin


# Kernels of few queries serve these where they may.
USUAL = [Case(LENS, heads=(8, 2), dim=128, dtype=dtype) for dtype in ("f32", "f16", "bf16")]


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("case", USUAL, ids=str)
def test_without_it_bits_differ(frontend: Frontend, rng: np.random.Generator, case: Case) -> None:
    """So the tests above can fail."""
    if os.environ.get("FLASHXLA_BATCH_INVARIANT") == "1":
        pytest.skip("FLASHXLA_BATCH_INVARIANT=1")
    texts, options = texts_of(rng, case), options_of(rng, case) | {"batch_invariant": False}
    whole = alone(frontend, case, texts, options)
    pieces = pieces_of(rng, case, "decoded")
    with pytest.raises(AssertionError, match=r"(out|LSE) of Piece"):
        for piece, got in attend(frontend, dense(case, texts, pieces) | options, pieces):
            assert_same(piece, got, whole)


# --- training and rollout -------------------------------------------------------------------------------------------


@pytest.mark.frontends("torch", "jax_jit", "lazy", "torchtpu", "torchax")
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_rollout_has_the_bits_of_training(frontend: Frontend, rng: np.random.Generator, dtype: str) -> None:
    """Steps of a serving engine, which write and attend in one call of padded shapes, against a packed batch."""
    case = Case(LENS, heads=(4, 2), dim=64, dtype=dtype, window=(90, -1))
    page, most = 16, 128
    texts = texts_of(rng, case)
    whole = alone(frontend, case, texts, options_of(rng, case))
    lengths_of = [length for length, _ in LENS]
    pages = [-(-length // page) for length in lengths_of]
    blocks = np.split(rng.permutation(sum(pages)), np.cumsum(pages))
    kv_cache: Any = tuple(nans((sum(pages), page, case.heads[1], dim), DTYPES[dtype]) for dim in case.dims)
    done = [0] * len(texts)
    while done[0] < lengths_of[0]:
        running = [int(i) for i in rng.permutation(len(texts)) if done[i] < lengths_of[i]]
        pieces, room = [], most
        for i in running:
            new = min(int(rng.choice([1, 7, 60])), lengths_of[i] - done[i], room)
            if new:
                pieces.append(Piece(i, done[i], done[i] + new))
            room -= new
        new_tokens = {
            name: np.concatenate(
                [texts[i][at][begin:end] for i, begin, end in pieces]
                + [nans((room, *texts[0][at].shape[1:]), DTYPES[dtype])]
            )
            for at, name in enumerate(("query", "key", "value"))
        }
        lengths, table = np.zeros(len(texts), np.int32), np.zeros((len(texts), max(pages)), np.int32)
        starts = np.full(len(texts) + 1, most - room, np.int32)
        starts[: len(pieces)] = np.cumsum([0, *(end - begin for _, begin, end in pieces)])[:-1]
        for s, (i, _, end) in enumerate(pieces):
            lengths[s] = end
            table[s, : pages[i]] = blocks[i]
        out, lse, kv_cache = frontend.ragged_paged_attention(
            **new_tokens,
            kv_cache=kv_cache,
            context_lens=lengths,
            block_tables=table,
            query_start_loc=starts,
            num_seqs=np.array([len(pieces)], np.int32),
            scale=case.dim**-0.5,
            layout="NHD",
            window_size=case.window,
            return_softmax_lse=True,
            batch_invariant=True,
        )
        for (i, begin, end), start in zip(pieces, starts, strict=False):
            done[i] = end
            rows = slice(start, start + end - begin)
            if i == 0:
                assert_same(Piece(i, begin, end), (out[rows], lse[:, rows]), whole)


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_recorded_gradients(frontend: TorchFrontend, rng: np.random.Generator, dtype: str) -> None:
    """They change no bit of the forward pass, and are those of the call without the option up to rounding."""
    case = Case(LENS, heads=(4, 2), dim=64, dtype=dtype)
    texts, options = texts_of(rng, case), options_of(rng, case)
    whole = alone(frontend, case, texts, options)
    pieces = wholes(rng, case)
    arguments = dense(case, texts, pieces) | options | {"return_softmax_lse": False}
    tensors = {k: frontend.tensor(v) for k, v in arguments.items() if isinstance(v, np.ndarray)}
    others = {k: v for k, v in arguments.items() if k not in tensors}
    sources = [tensors[name].requires_grad_() for name in "qkv"]
    out = frontend.fx.flash_attn_varlen_func(**tensors, **others)
    assert out.requires_grad
    for piece, start in zip(pieces, arguments["cu_seqlens_q"], strict=False):
        if piece.text == 0:
            assert_same_bits(frontend.array(out)[start : start + piece.end], whole[0], "out")
    usual = frontend.fx.flash_attn_varlen_func(**tensors, **others | {"batch_invariant": False})
    grad = frontend.torch.randn_like(out)
    tolerance = {"f32": 1e-4, "bf16": 3e-2}[dtype]
    for got, expected in zip(
        frontend.torch.autograd.grad(out, sources, grad),
        frontend.torch.autograd.grad(usual, sources, grad),
        strict=True,
    ):
        frontend.torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


# --- how it is asked for, and what serves it ------------------------------------------------------------------------


def calls(rng: np.random.Generator) -> dict[str, Arguments]:
    """A call of each function that has the option: two sequences of 5 tokens, 4 heads on 2."""
    q, kv = normal(rng, (2, 5, 4, 8), DTYPES["f32"]), normal(rng, (2, 5, 2, 2, 8), DTYPES["f32"])
    qkv = normal(rng, (2, 5, 3, 4, 8), DTYPES["f32"])
    k, v = (np.ascontiguousarray(kv[:, :, i]) for i in range(2))
    flat_q, flat_k, flat_v, flat_kv, flat_qkv = (x.reshape(10, *x.shape[2:]) for x in (q, k, v, kv, qkv))
    starts = np.array([0, 5, 10], np.int32)
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 5, "max_seqlen_k": 5}
    one = {"cu_seqlens": starts, "max_seqlen": 5}
    pages: Arguments = {
        "query": flat_q,
        "kv_cache": (k, v),
        "context_lens": np.array([5, 5], np.int32),
        "block_tables": np.array([[0], [1]], np.int32),
        "query_start_loc": starts,
        "num_seqs": np.array([2], np.int32),
        "layout": "NHD",
    }
    return {
        "flash_attn_varlen_func": {"q": flat_q, "k": flat_k, "v": flat_v, **lengths},
        "flash_attn_func": {"q": q, "k": k, "v": v},
        "flash_attn_kvpacked_func": {"q": q, "kv": kv},
        "flash_attn_qkvpacked_func": {"qkv": qkv},
        "flash_attn_varlen_kvpacked_func": {"q": flat_q, "kv": flat_kv, **lengths},
        "flash_attn_varlen_qkvpacked_func": {"qkv": flat_qkv, **one},
        "flash_attn_with_kvcache": {"q": q, "k_cache": k, "v_cache": v},
        "paged_attention": pages,
        "ragged_paged_attention": pages | {"key": flat_k, "value": flat_v},
    }


FUNCTIONS = list(calls(np.random.default_rng(0)))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_it_arrives(
    frontend: Frontend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """In the native call, from every function and front end; the default is not to ask for it."""
    arrived: list[Any] = []
    resolve = Op.resolve

    def noting(op: Op, tensors: Any, scalars: Any) -> Call:
        call = resolve(op, tensors, scalars)
        if op.native == "attention":
            arrived.append(dict(call.attributes)["batch_invariant"])
        return call

    monkeypatch.setattr(Op, "resolve", noting)
    mutated = ("kv_cache",) if function == "ragged_paged_attention" else ()
    scale = "scale" if "paged" in function else "softmax_scale"
    for options in ({}, {"batch_invariant": False}, {"batch_invariant": True}):
        arrived.clear()
        given = calls(rng)[function] | {scale: float(rng.random())}  # no call that is kept
        frontend.run(function, given | options, mutated)
        always = os.environ.get("FLASHXLA_BATCH_INVARIANT") == "1"
        assert arrived and set(arrived) == {int(options.get("batch_invariant", False) or always)}


# head sizes, dtype, the kernel on each platform, and why it is not the fastest one on a GPU
SERVED = [
    (64, 64, "float32", {"cpu": "tiles", "cuda": "tile32"}, "queries are float32"),
    (128, 128, "bfloat16", {"cpu": "tiles", "cuda": "wide"}, ""),
    (192, 128, "float16", {"cpu": "tiles", "cuda": "wide"}, ""),
    (100, 100, "bfloat16", {"cpu": "tiles", "cuda": "wide"}, ""),
    (
        *(99, 99, "bfloat16", {"cpu": "tiles", "cuda": "tile"}),
        "strides, addresses or the head size are not multiples of 4 bytes",
    ),
    (576, 512, "bfloat16", {"cpu": "tiles", "cuda": "large"}, "a head size, of 576 and 512, is above 256"),
]


@pytest.mark.parametrize("tokens", [1, 500])
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize(("dim", "v_dim", "dtype", "kernels", "why_not"), SERVED)
def test_one_kernel(
    dim: int, v_dim: int, dtype: str, kernels: dict[str, str], why_not: str, platform: str, tokens: int
) -> None:
    """It serves every sequence, and `explain` says why."""
    if not native.is_installed(platform):
        pytest.skip(f"libflashxla_{platform}.so is not installed")
    jax = pytest.importorskip("jax")
    caches = tuple(jax.ShapeDtypeStruct((9, 16, 2, d), dtype) for d in (dim, v_dim))
    query = jax.ShapeDtypeStruct((tokens, 4, dim), dtype)
    index = [jax.ShapeDtypeStruct(shape, "int32") for shape in ((2,), (2, 3), (3,), (1,))]
    got = flashxla.explain(
        "paged_attention", query, caches, *index, 0.1, batch_invariant=True, platform=platform
    )
    served = [(kernel.work, kernel.name) for kernel in got.kernels]
    assert served[0] == ("all queries", kernels[platform])
    # wide leaves it a sequence with a page that does not exist.
    assert served[1:] == (
        [("other sequences", "tile" if dim <= 128 else "large")] if served[0][1] == "wide" else []
    )
    reasons = ["batch_invariant: one kernel adds up every row in one order"]
    if platform == "cuda" and why_not:
        reasons.append(why_not)
    assert got.reason == "; ".join(reasons)


EXPLAIN = """
import numpy as np, flashxla, jax
q = jax.ShapeDtypeStruct((9, 4, 64), "float32")
i = jax.ShapeDtypeStruct((2,), "int32")
print(flashxla.explain("flash_attn_varlen_func", q, q, q, 9, i, 9, i, platform="cpu").reason)
"""


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), ("", False)])
def test_the_environment_asks_for_it(value: str, on: bool) -> None:
    """Of every call of a process."""
    pytest.importorskip("jax")
    environment = {**os.environ, "FLASHXLA_BATCH_INVARIANT": value}
    said = subprocess.check_output([sys.executable, "-c", EXPLAIN], env=environment, text=True)
    assert said.startswith("batch_invariant") == on, said
