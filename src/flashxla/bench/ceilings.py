"""The machine's own limits, measured: the best matrix product and the best copy that PyTorch does on it."""

from __future__ import annotations

import functools

import torch

from flashxla.bench import timing
from flashxla.bench.topic import Ceiling, Options


def matmul(dtype: torch.dtype, options: Options) -> Ceiling:
    """torch.matmul in float32 or the case's dtype, the faster one; its work in floating point operations."""
    size = 256 if options.quick else (8192 if options.device == "cuda" else 1024)
    ceilings = [_matmul(d, size, options.device) for d in dict.fromkeys((torch.float32, dtype))]
    return min(ceilings, key=lambda ceiling: timing.sample(ceiling.call, min_seconds=1e-3))


@functools.cache
def _matmul(dtype: torch.dtype, size: int, device: str) -> Ceiling:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    name = str(dtype).removeprefix("torch.")
    return Ceiling(f"matmul {size}^3 {name}", lambda: torch.matmul(a, b, out=out), 2.0 * size**3)


def copy(dtype: torch.dtype, options: Options) -> Ceiling:
    """A large torch copy_, far beyond the processor's caches; its work in bytes read and written."""
    return _copy(2**20 if options.quick else 2**27, options.device)


@functools.cache
def _copy(num_bytes: int, device: str) -> Ceiling:
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.zeros_like(source)
    return Ceiling(f"copy_ of {num_bytes // 2**20} MiB", lambda: target.copy_(source), 2.0 * num_bytes)
