"""Every engine of the CUDA library in the cases that it is for: right, and `explain` says that it served.

The engines are those of a Hopper GPU; test_few_queries.py has more of few queries.

On a CPU the same cases meet the kernels there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.batches import Case
from tests.frontends import Frontend
from tests.ops.engines import call_of, check, check_twice, served_by, serves_few

PREFILL = ((48, 48), (130, 200), (1, 40), (129, 129))
LONG = ((260, 300), (64, 500))
TILES = ((192, 192), (193, 400), (385, 385), (64, 300), (65, 65), (257, 700))  # around the ends of q tiles
ODD = ((100, 30), (60, 0), (0, 9), (47, 47), (128, 128))  # more queries than keys, no keys, no queries
SHORT = ((20, 60), (33, 33), (47, 150))  # too many rows for swap and split, too few queries for wide
BESIDE = (*SHORT, (60, 60))  # and one for wide: swap takes the others then
DECODE = ((1, 1), (1, 400), (1, 65), (1, 64))
CHUNKS = ((20, 900), (1, 300), (130, 140))  # swap would take the first
ONE_LONG = ((1, 5000),)
RAGGED = ((1, 700), (1, 3), (3, 1900), (1, 0), (2, 64), (1, 129))
SPECULATION = ((4, 100), (16, 16), (7, 330), (1, 31))

# case, the engine of few queries, the engine of many queries
ENGINES = [
    # wide: keys dense and in every layout
    *((Case(PREFILL, dim=d, dtype="bf16"), "swap", "wide") for d in (8, 64, 72, 96, 128, 192, 256)),
    (Case(PREFILL, dim=128, dtype="f16", used=True, pad_tokens=3, pad_seqs=2), "swap", "wide"),
    *(
        (
            Case(PREFILL, dim=128, dtype="bf16", page=16, layout=layout, pad_tokens=5, pad_seqs=1),
            "swap",
            "wide",
        )
        for layout in ("NHD", "HND", "interleaved", "packed_HND", "packed_NHD", "stacked")
    ),
    (Case(PREFILL, dim=64, dtype="f16", page=8, layout="HND"), "swap", "wide"),
    (Case(PREFILL, dim=64, dtype="bf16", page=24, layout="packed_NHD"), "swap", "wide"),
    (Case(PREFILL, dim=256, dtype="bf16", page=64, layout="stacked"), "swap", "wide"),
    (Case(LONG, dim=128, dtype="bf16", page=128), "swap", "wide"),
    (Case(ODD, dim=128, dtype="bf16", page=16), "swap", "wide"),
    (Case(ODD, dim=64, dtype="f16", causal=False, sinks="f16"), "swap", "wide"),
    *((Case(TILES, dim=d, dtype="bf16"), "swap", "wide") for d in (40, 64, 128)),
    (Case(TILES, dim=64, dtype="f16", page=16, window=(150, -1), leftpad=True), "swap", "wide"),
    (Case(TILES, dim=64, dtype="bf16", window=(30, 70), causal=False, sinks="f32"), "swap", "wide"),
    # wide: heads, masks, scores
    (Case(PREFILL, heads=(8, 1), dim=128, dtype="bf16"), "swap", "wide"),
    (Case(PREFILL, heads=(3, 3), dim=64, dtype="f16", page=16), "swap", "wide"),
    (Case(PREFILL, dim=128, dtype="bf16", sinks="bf16"), "swap", "wide"),
    (Case(PREFILL, dim=64, dtype="bf16", sinks="f32", page=16, window=(20, -1)), "swap", "wide"),
    (Case(PREFILL, dim=128, dtype="bf16", leftpad=True), "swap", "wide"),
    (Case(PREFILL, dim=128, dtype="bf16", leftpad=True, page=16, layout="HND"), "swap", "wide"),
    (Case(PREFILL, dim=64, dtype="f16", leftpad=True, sinks="f16", causal=False), "swap", "wide"),
    (Case(PREFILL, dim=128, dtype="bf16", window=(-1, 3), causal=False), "swap", "wide"),
    (Case(PREFILL, dim=128, dtype="bf16", window=(17, 9), causal=False, page=16), "swap", "wide"),
    (Case(LONG, dim=64, dtype="bf16", window=(0, 0), causal=False), "swap", "wide"),
    (Case(LONG, dim=128, dtype="bf16", window=(130, 2), page=16, leftpad=True), "swap", "wide"),
    (Case(PREFILL, dim=128, dtype="bf16", causal=False), "swap", "wide"),
    (Case(PREFILL, dim=128, dtype="bf16", softcap=5.0), "swap", "wide"),
    (Case(TILES, dim=128, dtype="bf16", softcap=5.0), "swap", "wide"),
    (Case(TILES, dim=128, dtype="bf16", softcap=30.0, page=16), "swap", "wide"),  # small scores
    (Case(LONG, dim=256, dtype="f16", softcap=50.0, window=(90, 7), causal=False), "swap", "wide"),
    (Case(LONG, dim=64, dtype="bf16", softcap=0.5), "swap", "wide"),  # large ones
    (Case(TILES, dim=64, dtype="f16", softcap=3.0, page=16, leftpad=True), "swap", "wide"),
    (Case(PREFILL, dim=128, dtype="bf16", softcap=5.0, scale=0.0), "swap", "wide"),
    (Case(PREFILL, dim=128, dtype="f16", softcap=3.0, scale=-0.2, sinks="f32"), "swap", "wide"),
    (Case(PREFILL, dim=64, dtype="bf16", scale=0.0), "swap", "wide"),
    (Case(PREFILL, dim=64, dtype="bf16", descale="SH", page=16), "swap", "wide"),
    (Case(PREFILL, dim=128, dtype="bf16", lse=False), "swap", "wide"),
    # wide: ALiBi
    (Case(PREFILL, dim=128, dtype="bf16", alibi="SH"), "swap", "wide"),
    (Case(ODD, dim=64, dtype="f16", alibi="H", sinks="f32", page=16), "swap", "wide"),
    (Case(LONG, dim=256, dtype="bf16", alibi="SH", causal=False, window=(90, 7)), "swap", "wide"),
    (Case(PREFILL, dim=72, dtype="bf16", alibi="H", softcap=4.0, leftpad=True), "swap", "wide"),
    (Case(PREFILL, dim=128, dtype="bf16", alibi="SH", scale=0.0), "swap", "wide"),
    # wide: pages of fewer than 8 tokens, or not of a multiple of 8, which threads copy
    *((Case(PREFILL, dim=128, dtype="bf16", page=page), "swap", "wide") for page in (1, 2, 3, 4, 6, 20)),
    (Case(PREFILL, dim=64, dtype="f16", page=17, sinks="f32"), "swap", "wide"),
    (Case(PREFILL, dim=128, dtype="bf16", page=4, layout="interleaved"), "swap", "wide"),
    (Case(PREFILL, dim=256, dtype="bf16", page=1, window=(9, 4), causal=False), "swap", "wide"),
    (Case(PREFILL, dim=192, dtype="f16", page=3, sinks="f32"), "swap", "wide"),
    (Case(LONG, dim=136, dtype="bf16", page=7, layout="HND", alibi="H"), "swap", "wide"),
    (Case(LONG, dim=160, dtype="bf16", page=48, softcap=5.0, pad_tokens=9), "swap", "wide"),
    (Case(LONG, dim=200, dtype="f16", page=5, layout="packed_HND", leftpad=True), "swap", "wide"),
    (Case(ODD, dim=8, dtype="bf16", page=2, layout="stacked", pad_tokens=4, pad_seqs=1), "swap", "wide"),
    (Case(LONG, heads=(8, 1), dim=96, dtype="bf16", page=1, layout="HND", alibi="SH"), "swap", "wide"),
    # wide: fp8 keys under queries of 16 bits
    (Case(PREFILL, dim=128, dtype="bf16", cache="e4m3", page=16, descale="SH"), "swap", "wide"),
    (Case(PREFILL, dim=64, dtype="f16", cache="u8:e5m2", page=16, layout="HND"), "swap", "wide"),
    (Case(LONG, dim=128, dtype="f16", cache="e4m3", descale="H", window=(70, -1)), "swap", "wide"),
    (Case(ODD, dim=256, dtype="bf16", cache="e5m2", page=8, layout="stacked"), "swap", "wide"),
    (Case(LONG, dim=192, dtype="f16", cache="u8:e4m3", page=24, sinks="f32", leftpad=True), "swap", "wide"),
    (Case(PREFILL, dim=16, dtype="bf16", cache="e4m3", alibi="H", softcap=3.0), "swap", "wide"),
    (Case(PREFILL, dim=128, dtype="bf16", cache="e4m3", page=1, descale="SH"), "swap", "wide"),
    (Case(LONG, dim=64, dtype="f16", cache="e5m2", page=6, layout="interleaved"), "swap", "wide"),
    (Case(PREFILL, dim=256, dtype="f16", cache="e4m3", page=2), "swap", "wide"),
    (Case(LONG, dim=192, dtype="bf16", cache="e4m3", page=1, alibi="H", leftpad=True), "swap", "wide"),
    # wide: products of e4m3
    (Case(PREFILL, dim=128, dtype="e4m3", cache="e4m3", page=16, descale="H", softcap=4.0), "swap", "wide"),
    (
        Case(PREFILL, dim=64, dtype="e4m3", cache="u8:e4m3", page=16, layout="HND", descale="SH"),
        "swap",
        "wide",
    ),
    (Case(LONG, dim=128, dtype="e4m3", cache="e4m3", causal=False), "swap", "wide"),
    (Case(ODD, dim=96, dtype="e4m3", cache="e4m3", page=8, sinks="f32", leftpad=True), "swap", "wide"),
    (Case(LONG, dim=16, dtype="e4m3", cache="e4m3", page=32, window=(40, 3), causal=False), "swap", "wide"),
    (Case(LONG, dim=128, dtype="e4m3", cache="e4m3", page=4, alibi="SH", pad_tokens=3), "swap", "wide"),
    (Case(LONG, dim=128, dtype="e4m3", cache="e4m3", page=7, window=(70, 9), causal=False), "swap", "wide"),
    (Case(TILES, dim=64, dtype="e4m3", cache="e4m3", page=16, scale=-0.2), "swap", "wide"),
    (Case(TILES, dim=112, dtype="e4m3", cache="e4m3", window=(150, -1), descale="SH"), "swap", "wide"),
    (Case(PREFILL, dim=256, dtype="e4m3", cache="e4m3", page=16, descale="H"), "swap", "wide"),
    (Case(TILES, dim=208, v_dim=256, dtype="e4m3", cache="e4m3", leftpad=True), "swap", "wide"),
    (Case(LONG, dim=256, dtype="e4m3", cache="e4m3", page=32, alibi="H", causal=False), "swap", "wide"),
    (Case(ODD, dim=256, dtype="e4m3", cache="e4m3", page=3, sinks="f32", pad_tokens=3), "swap", "wide"),
    (Case(LONG, dim=192, dtype="e4m3", cache="e4m3", page=24, softcap=4.0, leftpad=True), "swap", "wide"),
    (Case(TILES, dim=144, dtype="e4m3", cache="e4m3", page=64, sinks="f32"), "swap", "wide"),
    (Case(LONG, dim=176, dtype="e4m3", cache="e4m3", page=5, alibi="SH"), "swap", "wide"),
    (Case(TILES, dim=192, v_dim=128, dtype="e4m3", cache="e4m3", page=16), "swap", "wide"),
    (Case(LONG, dim=160, v_dim=80, dtype="e4m3", cache="e4m3", page=6, window=(70, 9)), "swap", "wide"),
    (Case(ODD, dim=192, v_dim=112, dtype="e4m3", cache="u8:e4m3", softcap=4.0, pad_seqs=1), "swap", "wide"),
    # wide: fp8 queries that it widens, too
    (Case(PREFILL, dim=128, dtype="e5m2", cache="e5m2", page=16, descale="H"), "swap", "wide"),
    (Case(PREFILL, dim=128, dtype="e4m3", cache="u8:e5m2", page=16), "swap", "wide"),
    (Case(PREFILL, dim=256, dtype="e4m3", cache="e5m2", page=16, descale="H"), "swap", "wide"),
    (Case(TILES, dim=64, dtype="e5m2", cache="e4m3", scale=-0.2, sinks="f32"), "swap", "wide"),
    (Case(LONG, dim=192, dtype="e5m2", cache="e4m3", page=24, softcap=4.0, leftpad=True), "swap", "wide"),
    (Case(ODD, dim=16, dtype="e5m2", cache="e5m2", page=2, alibi="SH", causal=False), "swap", "wide"),
    # wide: heads not of whole 16 bytes, in units of 8 or 4 bytes
    (Case(PREFILL, dim=120, dtype="e5m2", cache="e4m3", alibi="H", softcap=4.0), "swap", "wide"),
    (Case(LONG, dim=100, v_dim=52, dtype="f16", cache="e5m2", page=3, leftpad=True), "swap", "wide"),
    (Case(PREFILL, dim=136, dtype="bf16", cache="e4m3", used=True, pad_tokens=3), "swap", "wide"),
    (Case(TILES, dim=44, dtype="e4m3", cache="e4m3", page=16, window=(150, -1)), "swap", "wide"),
    (Case(PREFILL, dim=100, dtype="bf16", page=16, leftpad=True), "swap", "wide"),
    (Case(PREFILL, dim=250, v_dim=100, dtype="f16", page=3), "swap", "wide"),
    (Case(PREFILL, dim=46, dtype="bf16", leftpad=True), "swap", "wide"),
    (Case(PREFILL, dim=46, v_dim=100, dtype="bf16", page=16, leftpad=True), "swap", "wide"),
    # tile: what wide does not take. Copies have 8 bytes, 4, or an element
    (Case(PREFILL, dim=100, dtype="bf16", page=16, leftpad=True, alibi="SH"), "swap", "tile"),
    (Case(PREFILL, dim=250, v_dim=98, dtype="f16", page=3, alibi="H"), "swap", "tile"),
    (Case(PREFILL, dim=47, dtype="bf16", alibi="H"), "split", "tile"),
    (Case(PREFILL, dim=100, dtype="f16", cache="e4m3", page=16, descale="SH"), "swap", "wide"),
    (Case(PREFILL, dim=99, v_dim=72, dtype="bf16", cache="e5m2", page=16), "split", "tile"),
    (Case(PREFILL, dim=46, dtype="f16", page=16, alibi="SH"), "swap", "tile"),
    (Case(PREFILL, dim=72, dtype="bf16", cache="e4m3", page=16), "swap", "wide"),
    (Case(PREFILL, dim=72, dtype="e5m2", cache="e4m3", page=16), "swap", "wide"),
    (Case(SHORT, heads=(12, 3), dim=128, dtype="bf16", page=16), "swap", "tile"),
    (Case(SHORT, heads=(8, 1), dim=64, dtype="f16", leftpad=True, sinks="f32"), "swap", "tile"),
    (Case(BESIDE, heads=(12, 3), dim=128, dtype="bf16", page=16), "swap", "wide"),
    (Case(BESIDE, heads=(8, 1), dim=64, dtype="f16", leftpad=True, sinks="f32"), "swap", "wide"),
    # swap, which copies what TMA does not take, and split where there are no 4 bytes to copy
    (Case(DECODE, heads=(8, 2), dim=128, dtype="bf16", page=16), "swap", "swap"),
    (Case(DECODE, heads=(8, 8), dim=64, dtype="f16", page=16, layout="packed_HND"), "swap", "swap"),
    (Case(DECODE, heads=(6, 2), dim=256, dtype="bf16", page=8, layout="stacked"), "swap", "swap"),
    (Case(DECODE, heads=(28, 4), dim=96, dtype="bf16", page=1, alibi="H", sinks="bf16"), "swap", "swap"),
    (Case(DECODE, heads=(64, 1), dim=128, dtype="bf16", page=16, softcap=5.0), "swap", "swap"),
    (Case(DECODE, heads=(128, 1), dim=128, dtype="bf16", page=16), "swap", "swap"),
    (Case(DECODE, heads=(200, 2), dim=64, dtype="f16", leftpad=True), "swap", "swap"),
    (Case(((1, 90), (2, 40), (60, 60)), heads=(96, 1), dim=64, dtype="bf16"), "swap", "wide"),
    (
        Case(DECODE, heads=(8, 2), dim=128, dtype="bf16", cache="e4m3", page=16, descale="SH"),
        "swap",
        "swap",
    ),
    (Case(DECODE, heads=(8, 2), dim=128, dtype="e5m2", cache="e5m2", page=16), "swap", "swap"),
    (Case(DECODE, heads=(4, 1), dim=64, dtype="f16", cache="u8:e4m3", page=17), "swap", "swap"),
    (Case(SPECULATION, heads=(8, 2), dim=128, dtype="bf16", page=16, window=(50, -1)), "swap", "swap"),
    (Case(SPECULATION, heads=(8, 2), dim=128, dtype="bf16", page=17), "swap", "swap"),
    (Case(SPECULATION, heads=(8, 2), dim=72, dtype="bf16", cache="e4m3", page=16), "swap", "swap"),
    (Case(DECODE, heads=(100, 1), dim=46, dtype="f16", page=16, alibi="SH", softcap=5.0), "swap", "swap"),
    (Case(DECODE, heads=(8, 2), dim=256, dtype="e4m3", cache="e4m3", page=1, descale="H"), "swap", "swap"),
    (Case(DECODE, heads=(8, 2), dim=100, dtype="bf16", page=16), "swap", "swap"),
    (Case(DECODE, heads=(8, 2), dim=100, dtype="bf16", cache="e4m3", page=16), "swap", "swap"),
    (Case(SPECULATION, heads=(4, 1), dim=255, dtype="f16", page=17, sinks="f32"), "split", "split"),
    (Case(CHUNKS, heads=(8, 2), dim=64, dtype="bf16", page=4), "swap", "wide"),
    (Case(((0, 0), (1, 0)), heads=(8, 2), dim=64, dtype="bf16"), "split", "split"),  # no keys at all
    # split32: few float32 queries, whose keys are shared out
    (Case(DECODE, heads=(8, 2), dim=128, page=16, sinks="f32"), "split32", "split32"),
    (Case(ONE_LONG, heads=(32, 8), dim=128, page=16), "split32", "split32"),
    (Case(ONE_LONG, heads=(28, 4), dim=128, page=16, sinks="f32", softcap=5.0), "split32", "split32"),
    (Case(ONE_LONG, heads=(16, 1), dim=64, page=1, alibi="SH"), "split32", "split32"),
    (Case(ONE_LONG, heads=(4, 4), dim=256, page=16, window=(2000, -1)), "split32", "split32"),
    (Case(ONE_LONG, heads=(8, 2), dim=80, page=17, layout="HND", leftpad=True), "split32", "split32"),
    (Case(RAGGED, heads=(28, 4), dim=128, page=1, pad_seqs=2, pad_tokens=3), "split32", "split32"),
    (Case(RAGGED, heads=(8, 1), dim=80, page=16, layout="packed_NHD", window=(70, -1)), "split32", "tile32"),
    (Case(RAGGED, heads=(8, 2), dim=256, page=16, layout="stacked", alibi="H"), "split32", "split32"),
    (Case(RAGGED, heads=(8, 2), dim=64, used=True, sinks="f32", lse=False), "split32", "split32"),
    (Case(RAGGED, heads=(6, 2), dim=46, page=3, softcap=2.0), "split32", "split32"),  # no 16-byte vectors
    (Case(RAGGED, heads=(8, 2), dim=128, cache="e4m3", page=16, descale="SH"), "split32", "split32"),
    (Case(RAGGED, heads=(4, 4), dim=40, cache="u8:e5m2", page=5, descale="H"), "split32", "split32"),
    (Case(RAGGED, heads=(4, 1), dim=256, cache="e5m2", layout="interleaved", page=8), "split32", "split32"),
    (Case(SPECULATION, heads=(8, 2), dim=128, page=16, window=(50, -1)), "split32", "split32"),
    (Case(SPECULATION, heads=(4, 1), dim=256, leftpad=True, causal=False), "split32", "split32"),
    (Case(DECODE, heads=(100, 1), dim=72, page=16, alibi="SH"), "split32", "split32"),
    (Case(((0, 0), (1, 0)), heads=(8, 2), dim=64), "split32", "split32"),  # no keys at all
    # tile32
    (Case(PREFILL, dim=64, alibi="SH", softcap=5.0), "split32", "tile32"),
    (Case(PREFILL, dim=128, heads=(8, 2), page=16, sinks="f32"), "split32", "tile32"),
    (Case(PREFILL, dim=256, page=16, layout="packed_HND"), "split32", "tile32"),
    (Case(ODD, dim=128, page=16, sinks="f32"), "split32", "tile32"),  # tiles whose rows see no key
    (Case(ODD, heads=(8, 1), dim=80, page=1, window=(70, 9), causal=False), "split32", "tile32"),
    (
        Case(LONG, dim=40, cache="e4m3", page=17, descale="1", window=(30, 1), causal=False),
        "split32",
        "tile32",
    ),
    # swap, large_split and large: head sizes above 256
    (Case(DECODE, heads=(16, 1), dim=576, v_dim=512, dtype="bf16", page=16, sinks="f32"), "swap", "swap"),
    (
        Case(DECODE, heads=(17, 1), dim=576, v_dim=512, dtype="bf16", page=16, sinks="f32"),
        "large_split",
        "large_split",
    ),
    (Case(DECODE, heads=(128, 1), dim=576, v_dim=512, dtype="bf16", page=1), "large_split", "large_split"),
    (Case(SPECULATION, heads=(16, 1), dim=576, v_dim=512, dtype="f16", page=64), "large_split", "large"),
    (Case(PREFILL, dim=576, v_dim=512, dtype="bf16"), "large_split", "large"),
    (Case(ONE_LONG, heads=(16, 1), dim=576, v_dim=512, dtype="bf16", page=16), "swap", "swap"),
    (
        Case(ONE_LONG, heads=(100, 1), dim=512, dtype="f16", page=64, sinks="f32"),
        "large_split",
        "large_split",
    ),
    (Case(RAGGED, heads=(8, 2), dim=320, dtype="bf16", page=16, alibi="H"), "swap", "swap"),
    (Case(RAGGED, heads=(16, 2), dim=320, dtype="bf16", page=16, alibi="H"), "large_split", "large_split"),
    (Case(RAGGED, heads=(6, 2), dim=64, v_dim=400, dtype="f16", window=(70, -1)), "swap", "swap"),
    (
        Case(RAGGED, heads=(6, 1), dim=64, v_dim=400, dtype="f16", window=(70, -1)),
        "large_split",
        "large_split",
    ),
    (Case(LONG, dim=512, dtype="bf16", page=16, softcap=5.0), "large_split", "large"),
    (
        Case(TILES, heads=(3, 1), dim=512, dtype="f16", page=7, layout="HND", alibi="SH"),
        "large_split",
        "large",
    ),
    (
        Case(PREFILL, dim=512, dtype="bf16", layout="interleaved", page=16, scale=-0.05),
        "large_split",
        "large",
    ),
    (Case(ODD, heads=(2, 1), dim=320, dtype="bf16", window=(17, 9), causal=False), "large_split", "large"),
    (Case(LONG, heads=(5, 1), dim=264, dtype="bf16", window=(90, 7), leftpad=True), "large_split", "large"),
    (Case(PREFILL, dim=128, v_dim=264, dtype="f16", page=8, leftpad=True), "large_split", "large"),
    (
        Case(LONG, dim=296, v_dim=8, dtype="bf16", sinks="bf16", pad_tokens=5, pad_seqs=2),
        "large_split",
        "large",
    ),
    (Case(ODD, dim=8, v_dim=504, dtype="f16", used=True, lse=False), "large_split", "large"),
    # with fp8 keys, and fp8 queries
    (Case(DECODE, heads=(16, 1), dim=576, v_dim=512, dtype="bf16", cache="e4m3", page=8), "swap", "swap"),
    (
        Case(DECODE, heads=(18, 1), dim=576, v_dim=512, dtype="bf16", cache="e4m3", page=8),
        "large_split",
        "large_split",
    ),
    (
        Case(DECODE, heads=(128, 1), dim=576, v_dim=512, dtype="e4m3", cache="e4m3", page=64, descale="1"),
        "large_split",
        "large_split",
    ),
    (
        Case(ONE_LONG, heads=(16, 1), dim=576, v_dim=512, dtype="f16", cache="e5m2", page=1, sinks="f32"),
        "swap",
        "swap",
    ),
    (
        Case(RAGGED, heads=(8, 2), dim=320, dtype="bf16", cache="e4m3", page=16, alibi="H", descale="SH"),
        "swap",
        "swap",
    ),
    (
        Case(RAGGED, heads=(7, 1), dim=320, dtype="bf16", cache="e4m3", page=16, alibi="H", descale="SH"),
        "large_split",
        "large_split",
    ),
    (Case(PREFILL, dim=576, v_dim=512, dtype="bf16", cache="e5m2", page=16), "large_split", "large"),
    (
        Case(LONG, dim=512, dtype="e5m2", cache="e4m3", page=7, softcap=5.0, descale="SH"),
        "large_split",
        "large",
    ),
    (
        Case(ODD, heads=(2, 1), dim=272, dtype="f16", cache="e4m3", window=(17, 9), causal=False),
        "large_split",
        "large",
    ),
    (Case(LONG, dim=16, v_dim=400, dtype="bf16", cache="e4m3", leftpad=True), "large_split", "large"),
    # general: such head sizes, and float32, or no vectors
    (Case(DECODE, heads=(16, 1), dim=576, v_dim=512, page=16, sinks="f32"), "general", "general"),
    (Case(DECODE, heads=(2, 1), dim=281, dtype="bf16", cache="e4m3", page=8), "general", "general"),
    (Case(DECODE, heads=(20, 1), dim=280, dtype="bf16", cache="e4m3", page=8), "general", "general"),
    (Case(ODD, heads=(2, 1), dim=300, dtype="bf16", window=(17, 9), causal=False), "general", "general"),
    (Case(PREFILL, dim=128, v_dim=300, page=8, alibi="H", leftpad=True), "general", "general"),
    # values whose head size differs from the keys', up to 256
    (Case(PREFILL, dim=192, v_dim=128, dtype="bf16", leftpad=True), "swap", "wide"),
    (Case(PREFILL, dim=128, v_dim=192, dtype="bf16", page=16, causal=False), "swap", "wide"),
    (Case(LONG, dim=64, v_dim=256, dtype="f16", page=16, sinks="f32"), "swap", "wide"),
    (Case(PREFILL, dim=64, v_dim=32, dtype="bf16", page=16, alibi="H"), "swap", "wide"),
    (Case(PREFILL, dim=192, v_dim=128, dtype="bf16", page=1), "swap", "wide"),
    (Case(LONG, dim=192, v_dim=128, dtype="f16", page=16, softcap=5.0, window=(200, -1)), "swap", "wide"),
    (
        Case(LONG, heads=(4, 4), dim=136, v_dim=72, dtype="bf16", page=64, sinks="f32", scale=-0.1),
        "swap",
        "wide",
    ),
    (Case(PREFILL, dim=184, v_dim=8, dtype="bf16", alibi="SH", pad_tokens=5), "swap", "wide"),
    (Case(LONG, dim=192, v_dim=128, dtype="f16", page=3, leftpad=True, used=True), "swap", "wide"),
    (Case(ODD, dim=176, v_dim=120, dtype="bf16", causal=False), "swap", "wide"),
    (Case(LONG, dim=72, v_dim=160, dtype="f16", page=3, window=(70, 9), causal=False), "swap", "wide"),
    (Case(PREFILL, dim=192, v_dim=128, dtype="bf16", cache="e4m3", page=16, descale="SH"), "swap", "wide"),
    (Case(LONG, dim=128, v_dim=256, dtype="f16", cache="e5m2", page=2), "swap", "wide"),
    (Case(PREFILL, dim=128, v_dim=64, dtype="e4m3", cache="e4m3", page=16), "swap", "wide"),
    (Case(LONG, dim=64, v_dim=128, dtype="e4m3", cache="e4m3", page=1, softcap=4.0), "swap", "wide"),
    (Case(SHORT, dim=96, v_dim=128, dtype="f16", page=8, layout="HND", alibi="SH"), "swap", "tile"),
    (Case(SHORT, heads=(8, 1), dim=128, v_dim=72, dtype="bf16", page=16), "swap", "tile"),
    # large: heads above 128 that wide does not take
    (Case(SHORT, dim=192, v_dim=128, dtype="f16", page=8, layout="HND", alibi="SH"), "swap", "large"),
    (Case(SHORT, heads=(8, 1), dim=192, v_dim=128, dtype="bf16", page=16), "swap", "large"),
    (Case(SHORT, heads=(6, 2), dim=256, dtype="bf16", page=8, softcap=5.0), "swap", "large"),
    (Case(SHORT, heads=(5, 1), dim=136, dtype="f16", page=5, leftpad=True), "swap", "large"),
    (Case(SHORT, heads=(8, 2), dim=16, v_dim=200, dtype="bf16", sinks="f32"), "swap", "large"),
    (Case(PREFILL, dim=256, v_dim=3, dtype="f16"), "split", "tile"),
    (Case(PREFILL, dim=24, v_dim=48, dtype="bf16", cache="e4m3", page=16), "swap", "wide"),
    (Case(DECODE, heads=(8, 2), dim=192, v_dim=128, dtype="bf16", page=16, sinks="f32"), "swap", "swap"),
    (Case(DECODE, heads=(6, 2), dim=64, v_dim=128, dtype="f16", page=8, window=(50, -1)), "swap", "swap"),
    (Case(SPECULATION, heads=(8, 2), dim=128, v_dim=40, dtype="bf16", page=16), "swap", "swap"),
    (Case(DECODE, heads=(96, 1), dim=64, v_dim=200, dtype="bf16", page=16), "swap", "swap"),
    (Case(DECODE, heads=(8, 2), dim=128, v_dim=256, dtype="bf16", cache="e4m3", page=16), "swap", "swap"),
    (Case(DECODE, heads=(8, 2), dim=192, v_dim=128, dtype="bf16", page=1), "swap", "swap"),
    (Case(SPECULATION, heads=(4, 1), dim=40, v_dim=72, cache="u8:e4m3", page=17), "split32", "split32"),
    (Case(DECODE, dim=1, v_dim=3, dtype="e4m3", cache="e4m3", page=1, softcap=4.0), "split", "split"),
    (Case(RAGGED, heads=(8, 2), dim=192, v_dim=128, page=16, sinks="f32"), "split32", "split32"),
    (Case(ONE_LONG, heads=(8, 2), dim=64, v_dim=100, page=3), "split32", "split32"),
    (Case(PREFILL, dim=192, v_dim=128, page=16, alibi="SH"), "split32", "tile32"),
    (Case(LONG, dim=40, v_dim=65, page=17, softcap=2.0), "split32", "tile32"),
    (Case(PREFILL, dim=128, v_dim=36, cache="e4m3", page=16, descale="SH"), "split32", "tile32"),
]


@pytest.mark.frontends("torch")
@pytest.mark.parametrize(("case", "few", "many"), ENGINES, ids=str)
def test_engine(frontend: Frontend, rng: np.random.Generator, case: Case, few: str, many: str) -> None:
    function, arguments = call_of(rng, case)
    if (served := served_by(frontend, function, arguments)) is not None:
        assert served == (few, many)
    check_twice(frontend, function, arguments)


# The plan keeps 384 sequences and 512 long ones at hand, takes 1024 at once, and sorts 2048 tiles.
SIZES = [383, 384, 385, 511, 512, 513, 1023, 1024, 1025, 2047, 2048, 2049]


def many_sequences(rng: np.random.Generator, size: int, queries: tuple[int, int], **more: Any) -> Case:
    """Short sequences: (fewest, most) queries, and a few keys more."""
    len_q = rng.integers(*queries, size, endpoint=True)
    len_k = np.maximum(len_q + rng.integers(-2, 9, size), 0)
    lens = tuple(zip(len_q.tolist(), len_k.tolist(), strict=True))
    return Case(lens, heads=(2, 1), dim=8, pad_tokens=3, pad_seqs=2, **more)


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_many_short_sequences(frontend: Frontend, rng: np.random.Generator, size: int, dtype: str) -> None:
    page = int(rng.choice([8, 16]))
    check(frontend, *call_of(rng, many_sequences(rng, size, (0, 2), dtype=dtype, page=page)))


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("size", SIZES[2::3])
@pytest.mark.parametrize(("queries", "alibi"), [((30, 52), None), ((30, 40), "H")], ids=["wide", "swap"])
def test_many_long_sequences(
    frontend: Frontend, rng: np.random.Generator, size: int, queries: tuple[int, int], alibi: str | None
) -> None:
    case = many_sequences(rng, size, queries, dtype="bf16", page=8, alibi=alibi)
    check_twice(frontend, *call_of(rng, case))


# Of at most 256 sequences with few queries swap makes the plan itself; two are padding.
@pytest.mark.frontends("torch")
@pytest.mark.parametrize("size", [1, 2, 31, 33, 126, 127, 158, 159, 190, 253, 254, 255])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("most", [2, 14], ids=["16 rows", "32 rows"])
def test_own_plan(frontend: Frontend, rng: np.random.Generator, size: int, dim: int, most: int) -> None:
    case = dataclasses.replace(many_sequences(rng, size, (0, most), dtype="bf16", page=8), dim=dim)
    check_twice(frontend, *call_of(rng, case))


# Many sequences may be short, and then a multiprocessor has three thread blocks of swap. Some are long here.
@pytest.mark.gpu_engine
@pytest.mark.frontends("torch")
@pytest.mark.parametrize(
    ("size", "heads", "more"),
    [
        (512, (32, 32), {"dim": 64, "sinks": "f32"}),
        (1025, (16, 16), {"dim": 128, "alibi": "H"}),
        (1100, (32, 16), {"dim": 40, "dtype": "f16", "window": (50, -1)}),
        (4096, (8, 4), {"dim": 128, "softcap": 5.0}),
        (700, (24, 24), {"dim": 72, "layout": "HND", "descale": "SH"}),
    ],
)
def test_many_decoding_sequences(
    frontend: Frontend, rng: np.random.Generator, size: int, heads: tuple[int, int], more: dict[str, Any]
) -> None:
    keys = np.where(rng.random(size) < 0.005, rng.integers(1000, 3000, size), rng.integers(0, 100, size))
    lens = tuple((int(q), int(k)) for q, k in zip(rng.random(size) < 0.9, keys, strict=True))
    case = Case(lens, heads=heads, page=16, pad_tokens=3, pad_seqs=2, **{"dtype": "bf16", **more})
    function, arguments = call_of(rng, case)
    if (served := serves_few(frontend, function, arguments)) is not None:
        assert served.startswith("swap") and "three thread blocks" in served, served
    check_twice(frontend, function, arguments)


# Where sequences are alike, a thread block of swap may get whole ones, though others have fewer steps then.
@pytest.mark.frontends("torch")
@pytest.mark.parametrize(
    ("count", "queries", "keys"),
    [
        *((8, 1, 512), (12, 1, 512), (16, 1, 510), (17, 1, 512), (24, 1, 450), (28, 1, 512), (40, 1, 130)),
        *((12, 2, 512), (16, 16, 400), (6, 30, 512), (130, 1, 200), (258, 1, 129)),
    ],
)
@pytest.mark.parametrize("idle", [(), ((1, 0),), ((0, 300),)], ids=["all alike", "no keys", "no queries"])
def test_alike_sequences(
    frontend: Frontend,
    rng: np.random.Generator,
    count: int,
    queries: int,
    keys: int,
    idle: tuple[tuple[int, int], ...],
) -> None:
    lens = [*[(queries, keys)] * count, *idle]
    rng.shuffle(lens)
    case = Case(
        tuple((int(q), int(k)) for q, k in lens), heads=(8, 8), dim=64, dtype="bf16", page=16, pad_seqs=1
    )
    check_twice(frontend, *call_of(rng, case))


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("size", [40, 126, *SIZES[2::3]])
@pytest.mark.parametrize("bad", [1, 7, 200])
@pytest.mark.parametrize("honest", [True, False], ids=["max_seqlen_q holds", "max_seqlen_q is exceeded"])
def test_many_unsound_offsets(
    frontend: Frontend, rng: np.random.Generator, size: int, bad: int, honest: bool
) -> None:
    """Which sequences are skipped depends on all before them."""
    case = many_sequences(rng, size, (0, 3), dtype="bf16", page=8, causal=False)
    function, arguments = call_of(rng, case)
    arguments["q"] = rng.standard_normal(arguments["q"].shape, np.float32).astype(arguments["q"].dtype)
    at = rng.integers(0, size + 1, bad)
    near = arguments["cu_seqlens_q"][at] + rng.integers(-40, 40, bad)
    far = rng.integers(-(2**31), 2**31 - 1, bad)
    arguments["cu_seqlens_q"][at] = np.where(rng.random(bad) < 0.8, near, far)
    if honest:
        arguments["max_seqlen_q"] = len(arguments["q"])
    check(frontend, function, arguments)
