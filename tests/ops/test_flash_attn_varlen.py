"""flash_attn_varlen_func: dense and paged, every feature."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests import reference
from tests.batches import Arguments, Case, flash_attn_arguments
from tests.checks import assert_attention
from tests.frontends import Frontend
from tests.ops import engines

MIXED = ((1, 33), (5, 18), (9, 9), (4, 2))  # decode, chunked prefill, prefill, more queries than keys
PREFILL = ((7, 7), (20, 20))
DECODE = ((1, 1), (1, 40), (1, 17))
SPARSE = ((0, 5), (3, 0), (2, 6), (0, 0), (1, 1))  # sequences without queries, without keys, without both
ONE = ((1, 1),)
ALL: dict[str, Any] = {
    "heads": (6, 3),
    "softcap": 8.0,
    "alibi": "SH",
    "sinks": "f32",
    "leftpad": True,
    "descale": "SH",
    "scale": 0.1,
    "pad_tokens": 4,
    "pad_seqs": 2,
}

CASES = [
    # dtypes, dense
    Case(MIXED),
    Case(MIXED, dtype="bf16"),
    Case(MIXED, dtype="f16"),
    Case(MIXED, causal=False),
    Case(MIXED, dtype="bf16", causal=False, lse=False),
    # paged: layouts, page sizes, caches
    Case(MIXED, page=16),
    Case(MIXED, page=1, layout="HND"),
    Case(MIXED, page=8, dtype="bf16", layout="HND"),
    Case(MIXED, page=32, dtype="f16"),
    Case(MIXED, page=17, lse=False),
    Case(MIXED, page=16, dtype="bf16", cache="e4m3", descale="SH"),
    Case(MIXED, page=16, dtype="f16", cache="e5m2", descale="1"),
    Case(MIXED, page=16, dtype="f32", cache="u8:e4m3", descale="H"),
    Case(MIXED, page=16, dtype="bf16", cache="u8:e5m2", layout="HND"),
    Case(MIXED, page=16, dtype="e4m3", cache="e4m3", descale="SH"),
    Case(MIXED, dtype="e5m2", descale="H"),
    Case(MIXED, dtype="f32", cache="e4m3", descale="SH"),
    # head sizes and groups
    Case(MIXED, dim=1),
    Case(MIXED, dim=40, heads=(3, 3), page=16),
    Case(MIXED, dim=46, heads=(8, 1)),
    Case(MIXED, dim=72, heads=(6, 2), dtype="bf16", page=16),
    Case(MIXED, dim=80, dtype="f16"),
    Case(MIXED, dim=128, heads=(8, 1), page=16),
    Case(MIXED, dim=256, heads=(2, 1), page=8),
    # head sizes of keys and values
    Case(MIXED, dim=576, v_dim=512, heads=(4, 1), dtype="bf16", page=16),
    Case(MIXED, dim=576, v_dim=512, heads=(2, 1)),
    Case(MIXED, dim=192, v_dim=128, dtype="f16"),
    Case(MIXED, dim=192, v_dim=128, page=8, layout="HND", cache="u8:e5m2", descale="H"),
    Case(MIXED, dim=1, v_dim=3, layout="HND", page=1),
    Case(MIXED, dim=40, v_dim=72, used=True, causal=False),
    # masks
    Case(MIXED, window=(4, -1)),
    Case(MIXED, window=(4, 0), page=8),
    Case(MIXED, window=(-1, 3), causal=False),
    Case(MIXED, window=(2, 3), causal=False, page=8),
    Case(MIXED, window=(0, 0), causal=False),
    Case(MIXED, window=(3, 5)),  # causal makes the right window 0
    Case(MIXED, leftpad=True),
    Case(MIXED, leftpad=True, page=8, causal=False),
    Case(MIXED, leftpad=True, page=16, window=(6, -1), dtype="bf16"),
    # scores
    Case(MIXED, softcap=10.0),
    Case(MIXED, softcap=1.0, alibi="H", page=16),
    Case(MIXED, alibi="SH", causal=False),
    Case(MIXED, alibi="H", window=(5, 2), causal=False, dtype="bf16"),
    Case(MIXED, sinks="f32"),
    Case(MIXED, sinks="bf16", dtype="bf16", page=16, window=(7, -1)),
    Case(MIXED, sinks="f16", leftpad=True, softcap=5.0),
    Case(MIXED, scale=0.7),
    Case(MIXED, scale=-0.3, page=8),
    Case(MIXED, scale=0.0),
    Case(MIXED, scale=0.0, softcap=5.0),
    # batches
    Case(SPARSE),
    Case(SPARSE, page=8, sinks="f32"),
    Case(SPARSE, causal=False, dtype="bf16"),
    Case(DECODE, page=16, dtype="bf16", heads=(8, 1)),
    Case(PREFILL, dtype="f16"),
    Case(ONE),
    Case(ONE, page=1, dim=1, heads=(1, 1)),
    Case(MIXED, pad_tokens=5),
    Case(MIXED, pad_tokens=5, pad_seqs=3, page=16),
    Case(MIXED, pad_seqs=0),
    Case(MIXED, pad_tokens=3, pad_seqs=2, alibi="SH", descale="SH", leftpad=True),
    Case(MIXED, used=True),
    Case(MIXED, used=True, leftpad=True, pad_seqs=2, dtype="bf16"),
    # everything at once
    Case(MIXED, dtype="bf16", cache="u8:e4m3", page=17, layout="HND", window=(9, -1), **ALL),
    Case(MIXED, dim=72, causal=False, window=(9, 4), used=True, **ALL),
    Case(MIXED, dim=40, v_dim=72, dtype="f16", page=8, window=(9, -1), **ALL),
]


def check(frontend: Frontend, arguments: Arguments) -> None:
    engines.check(frontend, "flash_attn_varlen_func", arguments)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(frontend: Frontend, rng: np.random.Generator, case: Case) -> None:
    check(frontend, flash_attn_arguments(rng, case))


# vLLM's tests/kernels/attention/test_flash_attn.py: its sequences, heads, head sizes, windows and softcaps.
@pytest.mark.frontends("torch")
@pytest.mark.parametrize(
    "lens",
    [((1, 1328), (5, 18), (129, 463)), ((1, 523), (1, 37), (1, 2011))],
    ids=["varlen", "decode"],
)
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=str)
@pytest.mark.parametrize("dim", [40, 72, 80, 128, 256])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("window", [None, 256])
@pytest.mark.parametrize("softcap", [0.0, 10.0, 50.0])
def test_public_grid(
    frontend: Frontend,
    rng: np.random.Generator,
    lens: tuple[tuple[int, int], ...],
    heads: tuple[int, int],
    dim: int,
    dtype: str,
    window: int | None,
    softcap: float,
) -> None:
    sliding = (-1, -1) if window is None else (window - 1, 0)
    case = Case(lens, heads, dim, dtype, page=16, window=sliding, softcap=softcap)
    check(frontend, flash_attn_arguments(rng, case))


# Its fp8 cases: a float8 query and cache with descales, and a float8 cache under a 16-bit query.
@pytest.mark.frontends("torch")
@pytest.mark.parametrize("dtype", ["e4m3", "bf16"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("window", [(-1, -1), (255, 0)], ids=str)
def test_public_grid_fp8(
    frontend: Frontend, rng: np.random.Generator, dtype: str, dim: int, window: tuple[int, int]
) -> None:
    lens = ((1, 1328), (5, 18), (129, 463))
    case = Case(lens, (8, 2), dim, dtype, "e4m3", 16, window=window, descale="SH")
    check(frontend, flash_attn_arguments(rng, case))


# Multi-head latent attention's, and others on both sides of what a kernel takes at once.
@pytest.mark.frontends("torch")
@pytest.mark.parametrize(
    "dims", [(576, 512), (192, 128), (512, 512), (1, 3), (3, 1), (40, 72), (257, 256)], ids=str
)
@pytest.mark.parametrize(
    ("dtype", "cache"), [("f32", "same"), ("bf16", "same"), ("f16", "e4m3"), ("e5m2", "e4m3")]
)
@pytest.mark.parametrize("page", [None, 8, 17])
@pytest.mark.parametrize("lens", [DECODE, MIXED, ((70, 90),)], ids=["decode", "mixed", "prefill"])
def test_head_sizes(
    frontend: Frontend,
    rng: np.random.Generator,
    dims: tuple[int, int],
    dtype: str,
    cache: str,
    page: int | None,
    lens: tuple[tuple[int, int], ...],
) -> None:
    heads = (8, 1) if dims[0] > 500 else (4, 2)
    layout = str(rng.choice(["NHD", "HND"]))
    case = Case(lens, heads, dims[0], dtype, cache, page, layout, v_dim=dims[1], pad_tokens=2)
    check(frontend, flash_attn_arguments(rng, case))


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("trial", range(150))
def test_random_case(frontend: Frontend, rng: np.random.Generator, trial: int) -> None:
    """Any combination of features, each as likely as not."""

    def pick(*choices: object) -> object:
        return choices[rng.integers(len(choices))]

    kv_heads = int(rng.integers(1, 5))
    dtype = str(pick("f32", "bf16", "f16"))
    lens = tuple((int(q), int(k)) for q, k in rng.integers(0, 40, (rng.integers(1, 6), 2)))
    causal, page = bool(pick(True, False)), pick(None, 1, 2, 8, 16, 17, 32)
    v_dim = pick(None, None, int(rng.integers(1, 257)))
    case = Case(
        lens=lens,
        heads=(kv_heads * int(rng.integers(1, 5)), kv_heads),
        dim=int(rng.integers(1, 257)),
        dtype=dtype,
        cache=str(pick("same", "same", "e4m3", "e5m2", "u8:e4m3", "u8:e5m2")),
        page=page,  # type: ignore[arg-type]
        layout=str(pick("NHD", "HND")),
        causal=causal,
        window=(int(rng.integers(-1, 20)), int(rng.integers(-1, 20))),
        softcap=float(pick(0.0, 3.0)),  # type: ignore[arg-type]
        alibi=pick(None, "H", "SH"),  # type: ignore[arg-type]
        sinks=pick(None, "f32", dtype),  # type: ignore[arg-type]
        leftpad=bool(pick(True, False)),
        descale=pick(None, "1", "H", "SH"),  # type: ignore[arg-type]
        pad_tokens=int(pick(0, 3)),  # type: ignore[call-overload]
        pad_seqs=pick(None, 0, 2),  # type: ignore[arg-type]
        used=bool(pick(True, False)),
        v_dim=v_dim,  # type: ignore[arg-type]
    )
    check(frontend, flash_attn_arguments(rng, case))


@pytest.mark.frontends("inductor")
@pytest.mark.parametrize(
    "case", [Case(MIXED, dtype="bf16", page=16, pad_tokens=3), Case(MIXED, sinks="f32", lse=False)], ids=str
)
def test_inductor(frontend: Frontend, rng: np.random.Generator, case: Case) -> None:
    check(frontend, flash_attn_arguments(rng, case))


@pytest.mark.parametrize("page", [None, 8])
def test_no_sequence(frontend: Frontend, rng: np.random.Generator, page: int | None) -> None:
    """num_seqs 0: every token is padding."""
    arguments = flash_attn_arguments(rng, Case(MIXED, page=page, pad_seqs=1, sinks="f32"))
    arguments |= {"num_seqs": np.array([0], np.int32), "q": np.full_like(arguments["q"], np.nan)}
    check(frontend, arguments)


@pytest.mark.parametrize("page", [None, 8])
def test_no_token(frontend: Frontend, rng: np.random.Generator, page: int | None) -> None:
    check(frontend, flash_attn_arguments(rng, Case(((0, 3), (0, 0)), page=page)))


def test_no_key_at_all(frontend: Frontend, rng: np.random.Generator) -> None:
    check(frontend, flash_attn_arguments(rng, Case(((2, 0), (3, 0)))))


def test_gap_between_sequences(frontend: Frontend, rng: np.random.Generator) -> None:
    """cu_seqlens_q may start after row 0: the rows before it are padding."""
    arguments = flash_attn_arguments(rng, Case(MIXED, page=16))
    padding = np.full((4, *arguments["q"].shape[1:]), np.nan, np.float32)
    arguments["q"] = np.concatenate([padding, arguments["q"]])
    arguments["cu_seqlens_q"] = arguments["cu_seqlens_q"] + np.int32(4)
    check(frontend, arguments)


def test_window_none_is_unlimited(frontend: Frontend, rng: np.random.Generator) -> None:
    arguments = flash_attn_arguments(rng, Case(MIXED))
    out, _ = frontend.flash_attn_varlen_func(**arguments | {"window_size": None})
    assert_attention(out, None, reference.flash_attn_varlen_func(**arguments), arguments["q"].dtype)


def test_large_scores(frontend: Frontend, rng: np.random.Generator) -> None:
    """Scores whose exponentials overflow float32 many times over."""
    arguments = flash_attn_arguments(rng, Case(MIXED, dim=8, scale=1.0))
    arguments["q"] *= np.float32(256)  # exact, so that only the dot products round
    expected = reference.flash_attn_varlen_func(**arguments)
    out, lse = frontend.flash_attn_varlen_func(**arguments)
    assert lse is not None
    np.testing.assert_allclose(lse, expected[1], atol=1e-3, rtol=1e-6)
    np.testing.assert_allclose(out, expected[0], atol=3e-3)  # an ulp of a score of 2000 is 1e-4


def test_shared_pages(frontend: Frontend, rng: np.random.Generator) -> None:
    """Two sequences with a common prefix in one page."""
    arguments = flash_attn_arguments(rng, Case(((2, 20), (3, 20)), page=8))
    arguments["block_table"][1, :2] = arguments["block_table"][0, :2]
    check(frontend, arguments)


def test_upper_bounds_may_be_loose(frontend: Frontend, rng: np.random.Generator) -> None:
    arguments = flash_attn_arguments(rng, Case(MIXED, page=16, window=(5, -1)))
    check(frontend, arguments | {"max_seqlen_q": 1000, "max_seqlen_k": 100_000})


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("window", [(-1, -1), (13, -1)])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "e4m3"])
def test_values_that_are_no_numbers(
    frontend: Frontend, rng: np.random.Generator, dtype: str, window: tuple[int, int], value: float
) -> None:
    """They reach the queries that see them, and no other."""
    if frontend.device != "cpu" and dtype != "f32":
        pytest.skip("on GPUs they reach the queries of a tile")
    if dtype == "e4m3" and np.isinf(value):
        pytest.skip("e4m3 has no infinity")
    length, at, dim = 60, 31, 3
    case = Case(
        ((length, length),),
        dtype=dtype,
        cache="e4m3" if dtype == "e4m3" else "same",
        window=window,
        lse=False,
    )
    arguments = flash_attn_arguments(rng, case)
    expected = frontend.flash_attn_varlen_func(**arguments)[0].astype(np.float32)
    arguments["v"] = arguments["v"].copy()
    arguments["v"][at, :, dim] = value
    got = frontend.flash_attn_varlen_func(**arguments)[0].astype(np.float32)
    rows = np.arange(length)
    sees = (rows >= at) & ((rows <= at + window[0]) if window[0] >= 0 else True)
    assert not np.isfinite(got[sees][:, :, dim]).any()
    assert np.isfinite(got[~sees]).all() and np.isfinite(np.delete(got, dim, axis=2)).all()
    tolerance = 1e-5 if dtype == "f32" else 2e-2
    assert np.allclose(np.delete(got, dim, axis=2), np.delete(expected, dim, axis=2), tolerance, tolerance)
    assert np.allclose(got[~sees], expected[~sees], tolerance, tolerance)


@pytest.mark.frontends("torch", "jax_jit")
@pytest.mark.parametrize("dim", [36, 64, 80, 128, 256])
def test_float32_is_as_exact_as_its_products(frontend: Frontend, rng: np.random.Generator, dim: int) -> None:
    """The error is that of float32 arithmetic, not of TF32, which would be 1,000 times as large."""
    length, heads = 300, 2
    q, k, v = (rng.standard_normal((length, heads, dim), np.float32) for _ in range(3))
    bounds = np.array([0, length], np.int32)
    arguments: Arguments = {"q": q, "k": k, "v": v, "cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    arguments |= {"max_seqlen_q": length, "max_seqlen_k": length, "causal": True}
    out = frontend.flash_attn_varlen_func(**arguments)[0]

    def attention(dtype: type) -> Any:
        scores = np.einsum("ihd,jhd->hij", q.astype(dtype), k.astype(dtype)) / dtype(np.sqrt(dim))
        scores[:, ~np.tri(length, dtype=bool)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("hij,jhd->ihd", weights, v.astype(dtype))

    def error(result: Any) -> float:
        return float(np.sqrt(np.mean((result - exact) ** 2)))

    exact = attention(np.float64)
    assert error(out) < 3 * error(attention(np.float32))
