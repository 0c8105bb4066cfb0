"""A wheel in an environment that holds JAX and nothing else: python -I wheels/smoke.py.

Imports what pip installed, never a checkout. Holds a cache write and paged attention against NumPy.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from pathlib import Path

import jax
import numpy as np

import flashxla
import flashxla.jax as fx
from flashxla import native

HEADS, KV_HEADS, HEAD_SIZE = 8, 2, 64
BLOCKS, BLOCK_SIZE = 16, 16
LENGTHS, QUERIES = (37, 5, 64), (3, 1, 20)


def main() -> None:
    """Check the installation, then the two operations."""
    assert "site-packages" in flashxla.__file__, flashxla.__file__
    assert importlib.util.find_spec("torch") is None
    found = native.library("cpu").instruction_set
    assert found == expected_instruction_set(), found
    check()
    version = importlib.metadata.version
    print(
        f"Python {platform.python_version()}, flashxla {version('flashxla')}, jax {jax.__version__}, {found}: right"
    )


def expected_instruction_set() -> str:
    """What Linux says of this machine's processor. Products of bfloat16 pairs are slow on Intel's."""
    text = Path("/proc/cpuinfo").read_text()
    lines = text.splitlines()
    flags = set(next((line for line in lines if line.startswith("flags")), "").split())
    if not {"avx2", "fma", "f16c"} <= flags:
        return "baseline"
    if not {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags:
        return "avx2"
    return "avx512_bf16" if "avx512_bf16" in flags and "AuthenticAMD" in text else "avx512"


def check() -> None:
    """Write the keys of three sequences into pages, attend to them, and do the same in NumPy."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    tables = rng.permutation(BLOCKS).reshape(len(LENGTHS) + 1, -1)[: len(LENGTHS)].astype(np.int32)
    keys = [normal(n, KV_HEADS, HEAD_SIZE) for n in LENGTHS]
    values = [normal(n, KV_HEADS, HEAD_SIZE) for n in LENGTHS]
    slots = np.concatenate(
        [
            table[np.arange(n) // BLOCK_SIZE] * BLOCK_SIZE + np.arange(n) % BLOCK_SIZE
            for table, n in zip(tables, LENGTHS, strict=True)
        ]
    )
    cache = (BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
    write = jax.jit(fx.reshape_and_cache_flash, donate_argnums=(2, 3))
    caches = write(np.concatenate(keys), np.concatenate(values), normal(*cache), normal(*cache), slots)
    written = np.asarray(caches[0]).reshape(-1, KV_HEADS, HEAD_SIZE)[slots]
    np.testing.assert_array_equal(written, np.concatenate(keys))

    queries = [normal(n, HEADS, HEAD_SIZE) for n in QUERIES]
    starts = np.cumsum([0, *QUERIES]).astype(np.int32)
    scale = HEAD_SIZE**-0.5
    attend = jax.jit(fx.paged_attention, static_argnums=6)
    lengths, count = np.array(LENGTHS, np.int32), np.array([len(LENGTHS)], np.int32)
    out = np.asarray(attend(np.concatenate(queries), caches, lengths, tables, starts, count, scale))
    for i, (q, k, v) in enumerate(zip(queries, keys, values, strict=True)):
        expected = attention(q, k, v, scale)
        np.testing.assert_allclose(out[starts[i] : starts[i + 1]], expected, rtol=1e-4, atol=1e-5)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """Causal attention of one sequence's last tokens, in float64."""
    group = HEADS // KV_HEADS
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", q.astype(np.float64), k) * scale
    positions = np.arange(len(k))
    hidden = positions[None, :] > positions[len(k) - len(q) :, None]
    weights = np.exp(np.where(hidden, -np.inf, scores))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)


if __name__ == "__main__":
    main()
