"""The batches that are measured, and the work in them: plain numbers, no tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.settings import Settings
from flashxla.bench.topic import log_uniform

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1}

Lens = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Shape:
    """A causal batch over a paged cache: `lens` has (new tokens, all keys) of each sequence."""

    name: str
    lens: Lens
    heads: tuple[int, int] = (32, 8)  # of queries, of keys
    dim: int = 128
    page: int = 16
    dtype: str = "bfloat16"
    cache: str = "auto"  # or "fp8_e4m3"
    queries: str = "auto"  # or "fp8_e4m3": results are of `dtype`
    layout: str = "NHD"  # "HND", "interleaved"
    window: int | None = None  # how many keys a query sees, its own among them
    softcap: float = 0.0
    alibi: bool = False
    batch_invariant: bool = False
    seqs: int | None = None  # padded to so many sequences (of a token each)
    table_width: int | None = None

    @property
    def plain(self) -> bool:
        """Whether anything but us can be expected to serve it."""
        return (
            self.cache == self.queries == "auto"
            and self.layout == "NHD"
            and self.page == 16
            and self.window is None
            and self.softcap == 0
            and not self.alibi
            and not self.batch_invariant
            and self.seqs is None
            and self.dtype != "float32"
        )

    @property
    def uniform(self) -> bool:
        """Whether all sequences are alike."""
        return len(set(self.lens)) == 1

    @property
    def tokens(self) -> int:
        """Rows of q: the real ones, and one of each padded sequence."""
        return sum(new for new, _ in self.lens) + (self.num_seqs - len(self.lens))

    @property
    def num_seqs(self) -> int:
        """Sequences, padding among them."""
        return self.seqs or len(self.lens)

    @property
    def pages(self) -> tuple[int, ...]:
        """How many pages each sequence has."""
        return tuple(-(-keys // self.page) for _, keys in self.lens)

    @property
    def width(self) -> int:
        """Of the block table."""
        return self.table_width or max(self.pages)

    @property
    def cache_dtype(self) -> str:
        """What a cache element is."""
        return self.dtype if self.cache == "auto" else self.cache

    @property
    def query_dtype(self) -> str:
        """What an element of q is."""
        return self.dtype if self.queries == "auto" else self.queries


def visible_pairs(shape: Shape) -> int:
    """(query, key) pairs that the mask leaves."""
    return sum(_pairs(keys - new, keys, shape.window) for new, keys in shape.lens)


def _pairs(first: int, end: int, window: int | None) -> int:
    """The keys seen by the queries at positions first..end-1; position p sees min(p + 1, window)."""
    border = end if window is None else min(max(first, window), end)
    triangle = border * (border + 1) // 2 - first * (first + 1) // 2
    return triangle + (end - border) * (window or 0)


def flops(shape: Shape) -> float:
    """Of the two products."""
    return 4.0 * shape.dim * shape.heads[0] * visible_pairs(shape)


def kv_bytes(shape: Shape) -> float:
    """Of all keys and values, each read once."""
    keys = sum(keys for _, keys in shape.lens)
    return 2.0 * keys * shape.heads[1] * shape.dim * _ITEM_BYTES[shape.cache_dtype]


def qo_bytes(shape: Shape) -> float:
    """Of the queries and the results."""
    item_bytes = _ITEM_BYTES[shape.query_dtype] + _ITEM_BYTES[shape.dtype]
    return 1.0 * shape.tokens * shape.heads[0] * shape.dim * item_bytes


def prompts(*lens: int) -> Lens:
    """Whole prompts."""
    return tuple((n, n) for n in lens)


def newest(*keys: int) -> Lens:
    """One new token of each sequence."""
    return tuple((1, n) for n in keys)


def _variants(shape: Shape, **more: dict[str, Any]) -> tuple[Shape, ...]:
    """Other types, head sizes, masks, page sizes and layouts."""
    changes: dict[str, dict[str, Any]] = {
        "float16": {"dtype": "float16"},
        "head size 64": {"dim": 64},
        "head size 256": {"dim": 256, "heads": (16, 4)},
        "softcap 30": {"softcap": 30.0},
        "pages of 64": {"page": 64},
        "pages of 256": {"page": 256},
        "HND": {"layout": "HND"},
        "interleaved": {"layout": "interleaved"},
        **more,
    }
    return tuple(
        dataclasses.replace(shape, name=f"{shape.name}, {name}", **one) for name, one in changes.items()
    )


_LONG = Shape("1 x 8192", prompts(8192))
PREFILL = (
    _LONG,
    Shape("1 x 16384", prompts(16384)),
    Shape("4 x 2048", prompts(*[2048] * 4)),
    Shape("ragged 16k", prompts(8192, 4096, 2048, 1024, 512, 256, 128, 128)),
    Shape("2k new of 16k", ((2048, 16384),)),
)
# Small: no tensor core runs float32.
PREFILL_FLOAT32 = (Shape("1 x 2048", prompts(2048), dtype="float32"),)
_INVARIANT = {"batch_invariant": {"batch_invariant": True}}
_PROMPTS: dict[str, dict[str, Any]] = {
    "window 1024": {"window": 1024},
    "ALiBi": {"alibi": True},
    "pages of 4": {"page": 4},
    "pages of 1": {"page": 1},
    "fp8 cache": {"cache": "fp8_e4m3"},
    "fp8 cache, head size 256": {"cache": "fp8_e4m3", "dim": 256, "heads": (16, 4)},
    "all fp8": {"cache": "fp8_e4m3", "queries": "fp8_e4m3"},
    "all fp8, head size 64": {"cache": "fp8_e4m3", "queries": "fp8_e4m3", "dim": 64},
}
PREFILL_MORE = (*_variants(_LONG, **_PROMPTS, **_INVARIANT), *PREFILL_FLOAT32)

_WIDE = Shape("64 x 2k", newest(*[2048] * 64))
_DEEP = Shape("8 x 16k", newest(*[16384] * 8))
_SKEW_A = Shape("skew A", newest(*log_uniform(128, 16384, 64, seed=1)))
DECODE = (
    _DEEP,
    _WIDE,
    Shape("128 x 1k", newest(*[1024] * 128)),
    Shape("1 x 4k", newest(4096)),
    Shape("1 x 1k", newest(1024)),
    Shape("16 x 512", newest(*[512] * 16)),
    _SKEW_A,
    Shape("skew B", newest(65536, *[512] * 63)),
    dataclasses.replace(_WIDE, name="64 x 2k, padded to 256", seqs=256, table_width=1024),
    dataclasses.replace(_WIDE, name="64 x 2k, fp8 cache", cache="fp8_e4m3"),
    dataclasses.replace(_DEEP, name="8 x 16k, fp8 cache", cache="fp8_e4m3"),
)
DECODE_FLOAT32 = (
    Shape("8 x 2k", newest(*[2048] * 8), dtype="float32"),
    Shape("16 x 2k", newest(*[2048] * 16), dtype="float32"),
    Shape("1 x 16k", newest(16384), dtype="float32"),
)
DECODE_MORE = (
    *_variants(
        _WIDE, **{"64 heads on 8": {"heads": (64, 8)}, "32 heads on 32": {"heads": (32, 32)}}, **_INVARIANT
    ),
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
QUICK_PREFILL_MORE = (
    _small("40, window 9, HND", prompts(40), window=9, layout="HND"),
    _small("40, interleaved", prompts(40), layout="interleaved", softcap=30.0),
    _small("40, ALiBi, pages of 1", prompts(40), alibi=True, page=1),
    _small("40, all fp8", prompts(40), cache="fp8_e4m3", queries="fp8_e4m3"),
)
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
    if settings.quick:
        return found + (QUICK_PREFILL_MORE if section == "prefill" else ())
    return found + _MORE.get(section, ())


def named(section: str, name: str, settings: Settings) -> Shape:
    """One of them."""
    return next(shape for shape in of_section(section, settings) if shape.name == name)
