"""The batches that are measured, and the work in them: plain numbers, no tensors."""

from __future__ import annotations

import dataclasses

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1}

Lens = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Shape:
    """A causal batch over a paged cache: `lens` has (new tokens, all keys) of each sequence."""

    name: str
    lens: Lens
    heads: tuple[int, int] = (32, 8)  # of queries, of keys
    dim: int = 128
    v_dim: int | None = None  # of values, where it is another
    page: int = 16
    dtype: str = "bfloat16"
    cache: str = "auto"  # or "fp8_e4m3"
    queries: str = "auto"  # or "fp8_e4m3": results are of `dtype`
    layout: str = "NHD"  # "HND", "interleaved"
    window: int | None = None  # how many keys a query sees, its own among them
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    lse: bool = False  # is returned, too
    batch_invariant: bool = False
    seqs: int | None = None  # padded to so many sequences (of a token each)
    table_width: int | None = None

    @property
    def dims(self) -> tuple[int, int]:
        """Head sizes of keys and of values."""
        return self.dim, self.v_dim or self.dim

    @property
    def plain(self) -> bool:
        """Whether every peer can be expected to serve it."""
        return self.without_mask and not self.masked

    @property
    def without_mask(self) -> bool:
        """Whether a peer that knows the mask can be expected to serve it, on keys and values without pages."""
        return (
            self.cache == self.queries == "auto"
            and self.layout == "NHD"
            and self.page == 16
            and not self.lse
            and not self.batch_invariant
            and self.seqs is None
            and self.dtype != "float32"
        )

    @property
    def masked(self) -> bool:
        """Whether there is more to the scores than causality."""
        return self.window is not None or self.softcap != 0 or self.alibi or self.sinks

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
    return 2.0 * sum(shape.dims) * shape.heads[0] * visible_pairs(shape)


def kv_bytes(shape: Shape) -> float:
    """Of all keys and values that a query sees, each read once."""
    keys = sum(
        keys if shape.window is None else min(keys, new - 1 + shape.window) for new, keys in shape.lens
    )
    return 1.0 * keys * shape.heads[1] * sum(shape.dims) * _ITEM_BYTES[shape.cache_dtype]


def qo_bytes(shape: Shape) -> float:
    """Of the queries and the results."""
    items = zip(shape.dims, (shape.query_dtype, shape.dtype), strict=True)
    return 1.0 * shape.tokens * shape.heads[0] * sum(dim * _ITEM_BYTES[dtype] for dim, dtype in items)


def prompts(*lens: int) -> Lens:
    """Whole prompts."""
    return tuple((n, n) for n in lens)


def newest(*keys: int) -> Lens:
    """One new token of each sequence."""
    return tuple((1, n) for n in keys)
