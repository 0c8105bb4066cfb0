"""What prefill, decode and kv_write measure, and the work in it; whatever framework runs it."""

from __future__ import annotations

import dataclasses
from typing import Any

from flashxla.bench.topic import log_uniform


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """A batch: `lens` has (queries, keys) of each sequence; page None is dense keys and values.

    As many queries as keys, or one query (the newest token): there PyTorch's causal mask is the same as ours. window:
    how many keys a query sees, its own among them. deterministic: of gradients. batch_invariant: of our operation.
    """

    name: str
    lens: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (8, 8)  # of queries, of keys
    dim: int = 128
    v_dim: int | None = None  # of values; None: dim
    page: int | None = None
    window: int | None = None
    deterministic: bool = False
    batch_invariant: bool = False

    @property
    def dims(self) -> tuple[int, int]:
        """Of queries and keys, and of values."""
        return self.dim, self.v_dim or self.dim

    @property
    def ragged(self) -> bool:
        """Whether a padded batch wastes work."""
        return len(set(self.lens)) > 1

    @property
    def causal(self) -> bool:
        """Whether a mask is needed: a single query sees all keys."""
        return max(queries for queries, _ in self.lens) > 1


@dataclasses.dataclass(frozen=True)
class WriteCase:
    """`tokens` new tokens to shuffled slots of a cache of `blocks` pages."""

    name: str
    tokens: int
    blocks: int
    heads: int = 8
    dim: int = 128
    page: int = 16


def prompts(*lens: int) -> tuple[tuple[int, int], ...]:
    """As many keys as queries."""
    return tuple((n, n) for n in lens)


RAGGED = prompts(*log_uniform(64, 2048, 8, seed=1))

PREFILL = {
    "cpu": (
        AttentionCase("1 x 2048", prompts(2048)),
        AttentionCase("4 x 512", prompts(*[512] * 4)),
        AttentionCase("1 x 64", prompts(64)),
        AttentionCase("32 x 32", prompts(*[32] * 32)),
        AttentionCase("1 x 2048, pages of 16", prompts(2048), page=16),
        AttentionCase("1 x 2048, 32 heads on 8", prompts(2048), heads=(32, 8)),
        AttentionCase("ragged, 8 of 64 to 2048", RAGGED),
        AttentionCase("1 x 2048, batch_invariant", prompts(2048), batch_invariant=True),
    ),
    "cuda": (
        AttentionCase("1 x 8192, 32 heads on 8", prompts(8192), heads=(32, 8)),
        AttentionCase("1 x 8192, 32 heads on 8, pages of 16", prompts(8192), heads=(32, 8), page=16),
        AttentionCase("4 x 2048, 32 heads on 8, pages of 16", prompts(*[2048] * 4), heads=(32, 8), page=16),
        AttentionCase("ragged, 8 of 64 to 2048, pages of 16", RAGGED, heads=(32, 8), page=16),
        AttentionCase(
            "1 x 8192, 32 heads on 8, batch_invariant", prompts(8192), heads=(32, 8), batch_invariant=True
        ),
    ),
    "quick": (
        AttentionCase("2 x 32", prompts(32, 32), heads=(2, 2), dim=32),
        AttentionCase("2 x 32, batch_invariant", prompts(32, 32), dim=32, batch_invariant=True),
        AttentionCase("ragged, pages of 16, 4 heads on 2", prompts(7, 33), heads=(4, 2), dim=32, page=16),
    ),
}


def multiplied_pairs(case: AttentionCase) -> float:
    """Floating point operations of a product, a column: over the keys that causality and a window leave."""
    pairs = 0
    for n, _ in case.lens:
        window = n if case.window is None else min(case.window, n)
        pairs += window * (window + 1) // 2 + (n - window) * window
    return 2.0 * case.heads[0] * pairs


def prefill_work(case: AttentionCase, dtype: Any) -> float:
    """Floating point operations of two products."""
    return multiplied_pairs(case) * sum(case.dims)


def _batch(*keys: int) -> tuple[tuple[int, int], ...]:
    return tuple((1, n) for n in keys)


_EVEN = _batch(*[4096] * 8)
_SKEWED = _batch(4096, 1500, 900, 512, 300, 200, 130, 64)

DECODE = {
    "cpu": (
        AttentionCase("8 x 4096", _EVEN),
        AttentionCase("1 x 256, pages of 16", _batch(256), page=16),
        AttentionCase("64 x 128, pages of 16", _batch(*[128] * 64), page=16),
        AttentionCase("8 x 4096, pages of 16", _EVEN, page=16),
        AttentionCase("8 x 4096, 32 heads on 8", _EVEN, heads=(32, 8)),
        AttentionCase("8 x 4096, 32 heads on 8, pages of 16", _EVEN, heads=(32, 8), page=16),
        AttentionCase("ragged, 8 of 64 to 4096, pages of 16", _SKEWED, page=16),
        AttentionCase(
            "8 x 4096, 32 heads on 8, pages of 16, batch_invariant",
            _EVEN,
            heads=(32, 8),
            page=16,
            batch_invariant=True,
        ),
    ),
    "cuda": (
        AttentionCase("8 x 16k, 32 heads on 8, pages of 16", _batch(*[16384] * 8), heads=(32, 8), page=16),
        AttentionCase("64 x 2k, 32 heads on 8, pages of 16", _batch(*[2048] * 64), heads=(32, 8), page=16),
        AttentionCase("ragged, 8 of 64 to 4096, pages of 16", _SKEWED, heads=(32, 8), page=16),
        AttentionCase(
            "64 x 2k, 32 heads on 8, pages of 16, batch_invariant",
            _batch(*[2048] * 64),
            heads=(32, 8),
            page=16,
            batch_invariant=True,
        ),
    ),
    "quick": (
        AttentionCase("2 x 48", _batch(48, 48), heads=(2, 2), dim=32),
        AttentionCase("ragged, pages of 16, 4 heads on 2", _batch(7, 64), heads=(4, 2), dim=32, page=16),
    ),
}


def decode_work(case: AttentionCase, dtype: Any) -> float:
    """Bytes of the keys and values, each read once."""
    return float(sum(keys for _, keys in case.lens) * case.heads[1] * sum(case.dims) * dtype.itemsize)


KV_WRITE = {
    device: (WriteCase("64 tokens", 64, blocks), WriteCase("8192 tokens", 8192, blocks))
    for device, blocks in (("cpu", 1024), ("cuda", 16384))
} | {"quick": (WriteCase("5 tokens", 5, 4, heads=2, dim=16),)}


def write_work(case: WriteCase, dtype: Any) -> float:
    """Bytes of the new keys and values, read and written."""
    return 4.0 * case.tokens * case.heads * case.dim * dtype.itemsize
