"""paged_attention: the ragged paged attention of TPUs, in every layout of the cache."""

from __future__ import annotations

import numpy as np
import pytest

from tests import reference
from tests.batches import Arguments, Case, paged_attention_arguments
from tests.checks import assert_attention, assert_same_bits
from tests.frontends import Frontend
from tests.ops import engines

MIXED = ((1, 33), (5, 18), (9, 9), (4, 4))
DECODE = ((1, 1), (1, 40), (1, 17))
SPARSE = ((0, 5), (2, 6), (0, 0), (3, 0), (1, 1))

CASES = [
    Case(MIXED, layout="interleaved", page=16, pad_tokens=4, pad_seqs=3),
    Case(MIXED, layout="interleaved", page=16, dtype="bf16", pad_tokens=1),
    Case(MIXED, layout="interleaved", page=8, dtype="f16", window=(9, 0)),
    Case(MIXED, layout="packed_HND", page=16, dtype="bf16", softcap=10.0),
    Case(MIXED, layout="packed_NHD", page=1),
    Case(MIXED, layout="stacked", page=17, dtype="bf16"),
    Case(MIXED, layout="NHD", page=16),
    Case(MIXED, layout="HND", page=32, dtype="bf16"),
    Case(MIXED, layout="interleaved", page=16, dtype="bf16", cache="e4m3", descale="1"),
    Case(MIXED, layout="interleaved", page=16, dtype="f32", cache="u8:e5m2", descale="H"),
    Case(MIXED, layout="packed_HND", page=16, dtype="f16", cache="u8:e4m3", descale="SH"),
    Case(MIXED, layout="stacked", page=8, dtype="e4m3", cache="e4m3", descale="1"),
    Case(MIXED, layout="NHD", page=8, dtype="bf16", cache="e5m2"),
    Case(MIXED, layout="interleaved", page=16, window=(0, 0)),
    Case(MIXED, layout="interleaved", page=16, scale=0.5, heads=(6, 1), dim=40),
    Case(MIXED, layout="interleaved", page=16, heads=(3, 3), dim=46, softcap=5.0, window=(3, 0)),
    Case(DECODE, layout="interleaved", page=16, heads=(8, 1), dim=128, dtype="bf16", pad_seqs=5),
    Case(DECODE, layout="packed_NHD", page=16, heads=(2, 1), dim=256),
    Case(SPARSE, layout="interleaved", page=8, pad_seqs=2),
    Case(((1, 1),), layout="interleaved", page=1, heads=(1, 1), dim=1),
    # sinks, masks of both sides, ALiBi
    Case(MIXED, layout="interleaved", page=16, sinks="f32", pad_tokens=2, pad_seqs=1),
    Case(MIXED, layout="packed_HND", page=16, dtype="bf16", causal=False, sinks="bf16"),
    Case(MIXED, layout="packed_NHD", page=8, causal=False, window=(4, 3), lse=False),
    Case(MIXED, layout="stacked", page=16, alibi="SH", window=(9, 2), pad_seqs=2),
    Case(MIXED, layout="HND", page=8, dtype="f16", alibi="H", causal=False, window=(-1, 2)),
    Case(MIXED, layout="NHD", page=17, sinks="f16", alibi="H", softcap=5.0, window=(7, 0), lse=False),
    Case(MIXED, layout="interleaved", page=8, dtype="e4m3", cache="e4m3", descale="SH", causal=False),
    Case(SPARSE, layout="stacked", page=8, sinks="bf16", causal=False),
    # head sizes of keys and values
    Case(MIXED, layout="NHD", page=16, heads=(4, 1), dim=576, v_dim=512, dtype="bf16"),
    Case(MIXED, layout="HND", page=8, dim=192, v_dim=128, sinks="f32"),
    Case(MIXED, layout="NHD", page=1, dim=1, v_dim=3),
    Case(MIXED, layout="HND", page=17, dim=40, v_dim=72, cache="u8:e4m3", descale="H"),
    Case(MIXED, layout="packed_NHD", page=8, dim=512, heads=(2, 1)),
]


def check(frontend: Frontend, arguments: Arguments) -> None:
    out, _ = engines.check(frontend, "paged_attention", arguments)
    start, seqs = arguments["query_start_loc"], int(arguments["num_seqs"][0])
    assert not out[start[seqs] :].astype(np.float32).any(), "padding tokens are not 0"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(frontend: Frontend, rng: np.random.Generator, case: Case) -> None:
    check(frontend, paged_attention_arguments(rng, case))


# Lengths, and the longest that is promised.
PROMISED = [
    (((1, 9), (1, 300), (0, 4), (1, 1)), 1),
    (((1, 9), (1, 300), (0, 4), (1, 1)), 3),
    (((3, 70), (2, 2), (1, 33)), 3),
    (((3, 70), (40, 90)), 1000),
]


@pytest.mark.parametrize(("lens", "longest"), PROMISED)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_promised_lengths(
    frontend: Frontend, rng: np.random.Generator, lens: tuple[tuple[int, int], ...], longest: int, dtype: str
) -> None:
    case = Case(lens, (8, 2), 64, dtype, page=16, layout="packed_NHD", pad_tokens=5, pad_seqs=2)
    check(frontend, paged_attention_arguments(rng, case) | {"max_seqlen_q": longest})


# pytorch/xla's test/test_pallas.py, but not every dtype with every page size: a case takes a second.
@pytest.mark.frontends("torch")
@pytest.mark.parametrize("heads", [(32, 8), (8, 1)], ids=str)
@pytest.mark.parametrize(("dtype", "page"), [("f32", 32), ("bf16", 16)])
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("soft_cap", [0.0, 10.0])
def test_public_grid(
    frontend: Frontend,
    rng: np.random.Generator,
    heads: tuple[int, int],
    dtype: str,
    window: int | None,
    soft_cap: float,
    page: int,
) -> None:
    lens = ((1, 1328), (5, 18), (500, 563))
    sliding = (-1, -1) if window is None else (window - 1, 0)
    case = Case(
        lens, heads, 128, dtype, page=page, layout="interleaved", window=sliding, softcap=soft_cap, pad_seqs=5
    )
    check(frontend, paged_attention_arguments(rng, case))


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("layout", ["NHD", "HND", "interleaved", "packed_HND", "packed_NHD", "stacked"])
@pytest.mark.parametrize("cache", ["same", "e4m3", "u8:e5m2"])
@pytest.mark.parametrize("page", [1, 8, 16, 17, 32])
@pytest.mark.parametrize("dim", [1, 40, 72, 128, 256])
def test_every_layout(
    frontend: Frontend, rng: np.random.Generator, layout: str, cache: str, page: int, dim: int
) -> None:
    kv_heads = int(rng.integers(1, 4))
    heads = (kv_heads * int(rng.integers(1, 4)), kv_heads)
    dtype = str(rng.choice(["f32", "bf16", "f16"]))
    case = Case(MIXED, heads, dim, dtype, cache, page, layout, pad_tokens=2, pad_seqs=1)
    check(frontend, paged_attention_arguments(rng, case))


@pytest.mark.frontends("inductor")
def test_inductor(frontend: Frontend, rng: np.random.Generator) -> None:
    check(frontend, paged_attention_arguments(rng, CASES[0]))


def test_scales_may_be_numbers(frontend: Frontend, rng: np.random.Generator) -> None:
    case = Case(MIXED, layout="interleaved", page=16, dtype="bf16", cache="e4m3")
    check(frontend, paged_attention_arguments(rng, case) | {"k_scale": 0.5, "v_scale": 0.25})


def test_num_seqs_may_be_a_scalar_tensor(frontend: Frontend, rng: np.random.Generator) -> None:
    arguments = paged_attention_arguments(rng, CASES[0])
    expected = reference.paged_attention(**arguments)
    out, lse = frontend.paged_attention(**arguments | {"num_seqs": np.array(len(MIXED), np.int32)})
    assert_attention(out, lse, expected, arguments["query"].dtype)


@pytest.mark.parametrize("causal", [True, False])
def test_sliding_window_is_a_window_size(frontend: Frontend, rng: np.random.Generator, causal: bool) -> None:
    """A query sees so many last keys: itself and those to its left; to its right what causal leaves it."""
    arguments = paged_attention_arguments(rng, CASES[0])
    out, lse = frontend.paged_attention(**arguments, sliding_window=4, causal=causal)
    again, lse_again = frontend.paged_attention(**arguments, window_size=(3, -1), causal=causal)
    expected = reference.paged_attention(**arguments, window_size=(3, -1), causal=causal)
    assert_attention(out, lse, expected, arguments["query"].dtype)
    assert lse is not None and lse_again is not None
    assert_same_bits(again, out, "out")
    assert_same_bits(lse_again, lse, "lse")


@pytest.mark.frontends("torch", "jax")
def test_it_is_flash_attn_varlen_func(frontend: Frontend, rng: np.random.Generator) -> None:
    """The same call under both names, bit by bit."""
    case = Case(
        MIXED, page=16, dtype="bf16", sinks="f32", alibi="SH", causal=False, window=(9, 4), softcap=3.0
    )
    arguments = paged_attention_arguments(rng, case)
    out, lse = frontend.paged_attention(**arguments)
    k, v = arguments["kv_cache"]
    names = {"cu_seqlens_q": "query_start_loc", "seqused_k": "context_lens", "block_table": "block_tables"}
    shared = ("num_seqs", "s_aux", "alibi_slopes", "causal", "window_size", "return_softmax_lse")
    again, lse_again = frontend.flash_attn_varlen_func(
        q=arguments["query"],
        k=k,
        v=v,
        max_seqlen_q=len(arguments["query"]),
        max_seqlen_k=arguments["block_tables"].shape[1] * 16,
        softcap=3.0,
        **{name: arguments[given] for name, given in names.items()},
        **{name: arguments[name] for name in shared},
    )
    assert lse is not None and lse_again is not None
    assert_same_bits(again, out, "out")
    assert_same_bits(lse_again, lse, "lse")


def test_pair_means_nhd(frontend: Frontend, rng: np.random.Generator) -> None:
    """A pair of caches is NHD unless layout says HND, so the default layout does for it."""
    arguments = paged_attention_arguments(rng, Case(MIXED, layout="NHD", page=16))
    del arguments["layout"]
    check(frontend, arguments)


def test_write_then_attend(frontend: Frontend, rng: np.random.Generator) -> None:
    """A step of a model: new keys and values through slot_mapping, then attention over the cache."""
    case = Case(((3, 3), (1, 20)), layout="interleaved", page=8, heads=(4, 2), dtype="bf16")
    arguments = paged_attention_arguments(rng, case)
    cache = arguments["kv_cache"]
    expected = reference.paged_attention(**arguments)
    # Take the new tokens out of the cache and write them back through the op.
    slots = []
    for s, (len_q, len_k) in enumerate(case.lens):
        for position in range(len_k - len_q, len_k):
            page, offset = divmod(position, 8)
            slots.append(int(arguments["block_tables"][s, page]) * 8 + offset)
    flat = cache.reshape(-1, *cache.shape[2:])
    new = flat[slots]
    flat[slots] = np.nan
    slot_mapping = np.array([*slots, -1], np.int32)
    padding = np.full((1, 2, case.dim), np.nan, cache.dtype)
    key, value = (np.concatenate([new[:, first::2], padding]) for first in (0, 1))
    written = frontend.reshape_and_cache(
        key=key, value=value, kv_cache=cache, slot_mapping=slot_mapping, layout="interleaved"
    )
    out, lse = frontend.paged_attention(**arguments | {"kv_cache": written})
    assert_attention(out, lse, expected, cache.dtype)
