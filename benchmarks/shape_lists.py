"""The shapes that each section measures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from benchmarks.settings import Settings
from benchmarks.shapes import Lens, Shape, newest, prompts
from flashxla.bench.topic import log_uniform

Changes = Mapping[str, Mapping[str, Any]]


def changed(shape: Shape, changes: Changes) -> tuple[Shape, ...]:
    """A shape with each of the changes, and its name after the shape's."""
    return tuple(
        dataclasses.replace(shape, name=f"{shape.name}, {name}", **fields) for name, fields in changes.items()
    )


FP8_CACHE = {"cache": "fp8_e4m3"}
ALL_FP8 = {"cache": "fp8_e4m3", "queries": "fp8_e4m3"}
HEAD_SIZES: Changes = {
    "head size 64": {"dim": 64},
    "head size 96": {"dim": 96},
    "head size 192": {"dim": 192},
    "head size 256": {"dim": 256, "heads": (16, 4)},
}
# TMA cannot load heads that do not all begin and end at multiples of 16 bytes.
ODD_HEADS: Changes = {"head size 100": {"dim": 100}}
ODD_FP8_HEADS: Changes = {f"fp8 cache, head size {dim}": {**FP8_CACHE, "dim": dim} for dim in (100, 120)}
# Values with heads of another size, and heads above 256. Latent attention has the last ones: in prompts the first.
APART: Changes = {
    "head sizes 192 and 128": {"dim": 192, "v_dim": 128, "heads": (16, 16)},
    "head size 512": {"dim": 512, "heads": (8, 2)},
    "head sizes 576 and 512": {"dim": 576, "v_dim": 512, "heads": (16, 1)},
}
HEADS: Changes = {
    "32 heads on 32": {"heads": (32, 32)},
    "32 heads on 1": {"heads": (32, 1)},
    "64 heads on 8": {"heads": (64, 8)},
    "28 heads on 4": {"heads": (28, 4)},
    "8 heads on 1": {"heads": (8, 1)},
}
_MASKS: Changes = {
    "softcap 30": {"softcap": 30.0},
    "ALiBi": {"alibi": True},
    "window 1024": {"window": 1024},
    "sinks": {"sinks": True},
    "LSE returned": {"lse": True},
}
_CACHES: Changes = {
    "pages of 64": {"page": 64},
    "pages of 256": {"page": 256},
    "HND": {"layout": "HND"},
    "interleaved": {"layout": "interleaved"},
    "all fp8": ALL_FP8,
}
_INVARIANT: Changes = {"batch_invariant": {"batch_invariant": True}}
_OTHERS: Changes = {"float16": {"dtype": "float16"}, **_INVARIANT}

_LONG = Shape("1 x 8192", prompts(8192))
_SHORT = Shape("16 x 512", prompts(*[512] * 16))
_CHUNK = Shape("64 new of 16k", ((64, 16384),))
PREFILL = (
    _LONG,
    Shape("1 x 16384", prompts(16384)),
    Shape("4 x 2048", prompts(*[2048] * 4)),
    Shape("ragged 16k", prompts(8192, 4096, 2048, 1024, 512, 256, 128, 128)),
    Shape("2k new of 16k", ((2048, 16384),)),
)
# Small: no tensor core runs float32.
PREFILL_FLOAT32 = (Shape("1 x 2048, float32", prompts(2048), dtype="float32"),)
PREFILL_MORE = (
    Shape("1 x 512", prompts(512)),
    Shape("1 x 1024", prompts(1024)),
    Shape("1 x 2048", prompts(2048)),
    Shape("1 x 4096", prompts(4096)),
    _SHORT,
    Shape("64 x 128", prompts(*[128] * 64)),
    Shape("64 x 160", prompts(*[160] * 64)),
    Shape("128 x 64", prompts(*[64] * 128)),
    Shape("256 x 32", prompts(*[32] * 256)),
    Shape("64 x 64 new of 2k", ((64, 2048),) * 64),
    Shape("16 new of 16k", ((16, 16384),)),
    Shape("32 new of 16k", ((32, 16384),)),
    _CHUNK,
    Shape("128 new of 16k", ((128, 16384),)),
    *changed(_SHORT, {"head size 512": APART["head size 512"], "fp8 cache": FP8_CACHE}),
    *changed(_CHUNK, {**_INVARIANT, **ODD_HEADS, **ODD_FP8_HEADS, "pages of 1": {"page": 1}}),
    *changed(_LONG, {**HEAD_SIZES, **HEADS, **_MASKS, **_CACHES, **_OTHERS}),
    *changed(
        _LONG,
        {
            **ODD_HEADS,
            **ODD_FP8_HEADS,
            "pages of 4": {"page": 4},
            "pages of 1": {"page": 1},
            "fp8 cache": FP8_CACHE,
            "fp8 cache, room for 128k keys": {**FP8_CACHE, "table_width": 8192},
            "fp8 cache, head size 64": {**FP8_CACHE, "dim": 64},
            "fp8 cache, head size 192": {**FP8_CACHE, "dim": 192},
            "fp8 cache, head size 256": {**FP8_CACHE, "dim": 256, "heads": (16, 4)},
            "fp8 cache, head size 256, room for 128k keys": {
                **FP8_CACHE,
                "dim": 256,
                "heads": (16, 4),
                "table_width": 8192,
            },
            "all fp8, head size 64": {**ALL_FP8, "dim": 64},
            "all fp8, head size 192": {**ALL_FP8, "dim": 192},
            "all fp8, head size 256": {**ALL_FP8, "dim": 256, "heads": (16, 4)},
            "pages of 1, head size 256": {"page": 1, "dim": 256, "heads": (16, 4)},
            "fp8 cache, pages of 4": {**FP8_CACHE, "page": 4},
            "fp8 cache, pages of 1": {**FP8_CACHE, "page": 1},
            "fp8 cache, head sizes 576 and 512": {**FP8_CACHE, **APART["head sizes 576 and 512"]},
            "batch_invariant, head size 256": {"batch_invariant": True, "dim": 256, "heads": (16, 4)},
            **APART,
            "pages of 1, head size 512": {"page": 1, **APART["head size 512"]},
        },
    ),
    *PREFILL_FLOAT32,
)

_WIDE = Shape("64 x 2k", newest(*[2048] * 64))
_DEEP = Shape("8 x 16k", newest(*[16384] * 8))
_ONE_DEEP = Shape("1 x 16k", newest(16384))
_ONE = Shape("1 x 4k", newest(4096))
_SKEW_A = Shape("skew A", newest(*log_uniform(128, 16384, 64, seed=1)))
DECODE = (
    _DEEP,
    _WIDE,
    Shape("128 x 1k", newest(*[1024] * 128)),
    Shape("256 x 512", newest(*[512] * 256)),
    _ONE,
    Shape("1 x 1k", newest(1024)),
    Shape("16 x 512", newest(*[512] * 16)),
    _SKEW_A,
    Shape("skew B", newest(65536, *[512] * 63)),
    dataclasses.replace(_WIDE, name="64 x 2k, padded to 256", seqs=256, table_width=1024),
    dataclasses.replace(_WIDE, name="64 x 2k, fp8 cache", cache="fp8_e4m3"),
    dataclasses.replace(_DEEP, name="8 x 16k, fp8 cache", cache="fp8_e4m3"),
)
DECODE_FLOAT32 = (
    Shape("8 x 2k, float32", newest(*[2048] * 8), dtype="float32"),
    Shape("16 x 2k, float32", newest(*[2048] * 16), dtype="float32"),
    Shape("1 x 16k, float32", newest(16384), dtype="float32"),
)
DECODE_MORE = (
    Shape("1024 x 128", newest(*[128] * 1024)),
    Shape("4096 x 32", newest(*[32] * 4096)),
    Shape("64 x 2k, 4 queries each", ((4, 2048),) * 64),
    Shape("64 x 2k, 8 queries each", ((8, 2048),) * 64),
    Shape("64 x 2k, 16 queries each", ((16, 2048),) * 64),
    *changed(_WIDE, {**HEAD_SIZES, **HEADS, **_MASKS, **_CACHES, **_OTHERS, **APART}),
    *changed(
        _WIDE,
        {
            "head size 80": {"dim": 80},
            **ODD_HEADS,
            **ODD_FP8_HEADS,
            "pages of 4": {"page": 4},
            "pages of 1": {"page": 1},
            "fp8 cache, pages of 1": {**FP8_CACHE, "page": 1},
            "head sizes 576 and 512, 128 heads on 1": {**APART["head sizes 576 and 512"], "heads": (128, 1)},
            "fp8 cache, head sizes 576 and 512": {**FP8_CACHE, **APART["head sizes 576 and 512"]},
            "fp8 cache, head size 512": {**FP8_CACHE, **APART["head size 512"]},
            "head size 300": {"dim": 300, "heads": (8, 2)},
        },
    ),
    *changed(
        Shape("64 x 16k", newest(*[16384] * 64)),
        {name: HEADS[name] for name in ("32 heads on 1", "8 heads on 1")},
    ),
    *changed(_WIDE, {"fp8 cache, batch_invariant": {**FP8_CACHE, "batch_invariant": True}}),
    _ONE_DEEP,
    *changed(_ONE_DEEP, {**APART, **_INVARIANT}),
    *changed(_ONE, _INVARIANT),
    *changed(_DEEP, _INVARIANT),
    dataclasses.replace(_DEEP, name="8 x 16k, padded to 256", seqs=256, table_width=1024),
    dataclasses.replace(_SKEW_A, name="skew A, fp8 cache", cache="fp8_e4m3"),
    *DECODE_FLOAT32,
)

_ROWS = newest(*[2048] * 64)
MIXED = (
    Shape("64 decode rows of 2k + 2k new of 2k", (*_ROWS, (2048, 2048))),
    Shape("64 decode rows of 2k + 2k new of 16k", (*_ROWS, (2048, 16384))),
)

# One plan for all layers, or one each.
PLAN = (
    Shape("decode 256 x 512", newest(*[512] * 256)),
    Shape("decode 64 x 2k", newest(*[2048] * 64)),
    Shape("decode 1 x 1k", newest(1024)),
    Shape("decode 16 x 2k", newest(*[2048] * 16)),
    Shape("prefill 1 x 8k", prompts(8192)),
    Shape("prefill 64 x 128", prompts(*[128] * 64)),
    Shape("prefill 4 x 2k", prompts(*[2048] * 4)),
    Shape("prefill 1 x 512", prompts(512)),
)


def _small(name: str, lens: Lens, **more: Any) -> Shape:
    return Shape(name, lens, heads=(4, 2), dim=64, **more)


QUICK = {
    "prefill": (
        _small("2 x 40", prompts(40, 40)),
        _small("ragged", prompts(7, 33)),
        _small("8 new of 40", ((8, 40),)),
    ),
    "decode": (
        _small("2 x 40", newest(40, 40)),
        _small("skew", newest(100, 7, 9)),
        _small("2 x 40, padded to 5", newest(40, 40), seqs=5, table_width=8),
        _small("2 x 40, fp8 cache", newest(40, 40), cache="fp8_e4m3"),
    ),
    "mixed": (_small("2 decode rows of 40 + 8 new of 16", (*newest(40, 40), (8, 16))),),
    "overhead": (_small("cache write + decode 1 x 40", newest(40)),),
    "plan": (_small("decode 2 x 40", newest(40, 40)), _small("prefill 2 x 20", prompts(20, 20))),
}
_QUICK_MORE = {
    "prefill": (
        _small("40, window 9, HND", prompts(40), window=9, layout="HND"),
        _small("40, interleaved", prompts(40), layout="interleaved", softcap=30.0),
        _small("40, ALiBi, pages of 1", prompts(40), alibi=True, page=1),
        _small("40, all fp8", prompts(40), **ALL_FP8),
        _small("40, LSE returned", prompts(40), lse=True),
        *changed(_small("2 x 40", prompts(40, 40)), {**_MASKS, "window 9": {"window": 9}}),
    ),
    "decode": changed(
        _small("2 x 40", newest(40, 40)),
        {**_MASKS, "window 9": {"window": 9}, "all fp8": ALL_FP8},
    ),
}
FULL = {
    "prefill": PREFILL,
    "decode": DECODE,
    "mixed": MIXED,
    "overhead": (Shape("cache write + decode 1 x 1k", newest(1024)),),
    "plan": PLAN,
}
_MORE = {"prefill": PREFILL_MORE, "decode": DECODE_MORE}
_FLOAT32 = {"prefill": PREFILL_FLOAT32, "decode": DECODE_FLOAT32}


def of_section(section: str, settings: Settings) -> tuple[Shape, ...]:
    """The shapes of a section of attention."""
    if settings.dtype == "float32" and section in _FLOAT32 and not settings.quick:
        return _FLOAT32[section]
    found = tuple(
        dataclasses.replace(shape, dtype=settings.dtype)
        for shape in (QUICK if settings.quick else FULL)[section]
    )
    if not settings.everything:
        return found
    return found + (_QUICK_MORE if settings.quick else _MORE).get(section, ())


def in_every_front_end(section: str, name: str, settings: Settings) -> bool:
    """Whether a case is measured in JAX, too. Those that `everything` adds are not: JAX compiles each for seconds."""
    return any(shape.name == name for shape in (QUICK if settings.quick else FULL)[section])


def named(section: str, name: str, settings: Settings) -> Shape:
    """One of them."""
    return next(shape for shape in of_section(section, settings) if shape.name == name)
