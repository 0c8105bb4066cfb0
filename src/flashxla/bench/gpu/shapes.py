"""The batches that are measured, and the work in them: plain numbers, no tensors."""

from __future__ import annotations

import dataclasses

from flashxla.bench.gpu.settings import Settings
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
    layout: str = "NHD"  # "HND", "interleaved"
    window: int | None = None  # how many keys a query sees, its own among them
    softcap: float = 0.0
    seqs: int | None = None  # padded to so many sequences (of a token each)
    table_width: int | None = None

    @property
    def plain(self) -> bool:
        """Whether anything but us can be expected to serve it."""
        return (
            self.cache == "auto"
            and self.layout == "NHD"
            and self.page == 16
            and self.window is None
            and self.softcap == 0
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
    return 2.0 * shape.tokens * shape.heads[0] * shape.dim * _ITEM_BYTES[shape.dtype]


def prompts(*lens: int) -> Lens:
    """Whole prompts."""
    return tuple((n, n) for n in lens)


def newest(*keys: int) -> Lens:
    """One new token of each sequence."""
    return tuple((1, n) for n in keys)


def skew_a() -> Lens:
    """64 sequences, log-uniform."""
    return newest(*log_uniform(128, 16384, 64, seed=1))


def skew_b() -> Lens:
    """One long sequence among short ones."""
    return newest(65536, *[512] * 63)


_LONG = Shape("1 x 8192", prompts(8192))
PREFILL = (
    _LONG,
    Shape("1 x 16384", prompts(16384)),
    Shape("4 x 2048", prompts(*[2048] * 4)),
    Shape("ragged 16k", prompts(8192, 4096, 2048, 1024, 512, 256, 128, 128)),
    Shape("2k new of 16k", ((2048, 16384),)),
)
PREFILL_FLOAT32 = (Shape("1 x 2048", prompts(2048), dtype="float32"),)
PREFILL_MORE = (
    dataclasses.replace(_LONG, name="1 x 8192, float16", dtype="float16"),
    dataclasses.replace(_LONG, name="1 x 8192, head size 64", dim=64),
    dataclasses.replace(_LONG, name="1 x 8192, head size 256", dim=256, heads=(16, 4)),
    dataclasses.replace(_LONG, name="1 x 8192, window 1024", window=1024),
    dataclasses.replace(_LONG, name="1 x 8192, softcap 30", softcap=30.0),
    dataclasses.replace(_LONG, name="1 x 8192, pages of 64", page=64),
    dataclasses.replace(_LONG, name="1 x 8192, pages of 256", page=256),
    dataclasses.replace(_LONG, name="1 x 8192, HND", layout="HND"),
    dataclasses.replace(_LONG, name="1 x 8192, interleaved", layout="interleaved"),
    *PREFILL_FLOAT32,
)

_WIDE = Shape("64 x 2k", newest(*[2048] * 64))
DECODE = (
    Shape("8 x 16k", newest(*[16384] * 8)),
    _WIDE,
    Shape("128 x 1k", newest(*[1024] * 128)),
    Shape("1 x 4k", newest(4096)),
    Shape("1 x 1k", newest(1024)),
    Shape("16 x 512", newest(*[512] * 16)),
    Shape("skew A", skew_a()),
    Shape("skew B", skew_b()),
    dataclasses.replace(_WIDE, name="64 x 2k, padded to 256", seqs=256, table_width=1024),
    dataclasses.replace(_WIDE, name="64 x 2k, fp8 cache", cache="fp8_e4m3"),
    Shape("8 x 16k, fp8 cache", newest(*[16384] * 8), cache="fp8_e4m3"),
)
DECODE_FLOAT32 = (Shape("8 x 2k", newest(*[2048] * 8), dtype="float32"),)
DECODE_MORE = (
    dataclasses.replace(_WIDE, name="64 x 2k, float16", dtype="float16"),
    dataclasses.replace(_WIDE, name="64 x 2k, head size 64", dim=64),
    dataclasses.replace(_WIDE, name="64 x 2k, head size 256", dim=256, heads=(16, 4)),
    dataclasses.replace(_WIDE, name="64 x 2k, 64 heads on 8", heads=(64, 8)),
    dataclasses.replace(_WIDE, name="64 x 2k, 32 heads on 32", heads=(32, 32)),
    dataclasses.replace(_WIDE, name="64 x 2k, softcap 30", softcap=30.0),
    dataclasses.replace(_WIDE, name="64 x 2k, pages of 64", page=64),
    dataclasses.replace(_WIDE, name="64 x 2k, pages of 256", page=256),
    dataclasses.replace(_WIDE, name="64 x 2k, HND", layout="HND"),
    dataclasses.replace(_WIDE, name="64 x 2k, interleaved", layout="interleaved"),
    Shape("8 x 16k, padded to 256", newest(*[16384] * 8), seqs=256, table_width=1024),
    Shape("skew A, fp8 cache", skew_a(), cache="fp8_e4m3"),
    *DECODE_FLOAT32,
)

_ROWS = newest(*[2048] * 64)
MIXED = (
    Shape("64 decode rows of 2k + 2k new of 2k", (*_ROWS, (2048, 2048))),
    Shape("64 decode rows of 2k + 2k new of 16k", (*_ROWS, (2048, 16384))),
)

QUICK_PREFILL = (
    Shape("2 x 40", prompts(40, 40), heads=(4, 2), dim=64),
    Shape("ragged", prompts(7, 33), heads=(4, 2), dim=64),
    Shape("8 new of 40", ((8, 40),), heads=(4, 2), dim=64),
)
QUICK_PREFILL_MORE = (
    Shape("40, window 9, HND", prompts(40), heads=(4, 2), dim=64, window=9, layout="HND"),
    Shape("40, interleaved", prompts(40), heads=(4, 2), dim=64, layout="interleaved", softcap=30.0),
)
QUICK_DECODE = (
    Shape("2 x 40", newest(40, 40), heads=(4, 2), dim=64),
    Shape("skew", newest(100, 7, 9), heads=(4, 2), dim=64),
    Shape("2 x 40, padded to 5", newest(40, 40), heads=(4, 2), dim=64, seqs=5, table_width=8),
    Shape("2 x 40, fp8 cache", newest(40, 40), heads=(4, 2), dim=64, cache="fp8_e4m3"),
)
QUICK_MIXED = (Shape("2 decode rows of 40 + 8 new of 16", (*newest(40, 40), (8, 16)), heads=(4, 2), dim=64),)


def of_section(section: str, settings: Settings) -> tuple[Shape, ...]:
    """The shapes of prefill, decode or mixed."""
    if settings.quick:
        main: tuple[Shape, ...]
        main = {"prefill": QUICK_PREFILL, "decode": QUICK_DECODE, "mixed": QUICK_MIXED}[section]
        more: tuple[Shape, ...] = QUICK_PREFILL_MORE if section == "prefill" else ()
    else:
        main = {"prefill": PREFILL, "decode": DECODE, "mixed": MIXED}[section]
        more = {"prefill": PREFILL_MORE, "decode": DECODE_MORE, "mixed": ()}[section]
        if settings.dtype == "float32" and section != "mixed":
            # Small: no tensor core runs float32.
            return {"prefill": PREFILL_FLOAT32, "decode": DECODE_FLOAT32}[section]
    main = tuple(dataclasses.replace(shape, dtype=settings.dtype) for shape in main)
    return main + (more if settings.everything else ())
