"""What the GPU itself can do, measured in the same run: the best copy and the best matrix product."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from flashxla.bench.gpu import compare, timers
from flashxla.bench.gpu.settings import Settings
from flashxla.bench.gpu.timers import Timer

COPY, MATMUL = "copy", "matmul"


def measure(settings: Settings) -> dict[str, dict[str, Any]]:
    """Both ceilings, in TB/s (read + written) and TFLOP/s; by JAX where PyTorch has no CUDA."""
    num_bytes, size = (2**20, 128) if settings.quick else (4 * 2**30, 8192)
    in_torch = not settings.cuda or torch.cuda.is_available()
    ways = (_copy_in_torch, _matmul_in_torch) if in_torch else (_copy_in_jax, _matmul_in_jax)
    copy, copy_method = _rate(ways[0](num_bytes, settings), 2.0 * num_bytes, settings)
    matmul, matmul_method = _rate(ways[1](size, settings), 2.0 * size**3, settings)
    compare.free_memory(settings)
    copy_name = f"device to device copy of {num_bytes / 2**30:.3g} GiB, read + written"
    matmul_name = f"matmul {size}^3 bfloat16, random numbers"
    return {
        COPY: {"name": copy_name, "rate": copy, "unit": "TB/s", "method": copy_method},
        MATMUL: {"name": matmul_name, "rate": matmul, "unit": "TFLOP/s", "method": matmul_method},
    }


def _rate(ways: list[Timer], work: float, settings: Settings) -> tuple[float, str]:
    """Of the best way."""
    seconds = [statistics.median(way.sample() for _ in range(settings.rounds)) for way in ways]
    best = min(range(len(ways)), key=seconds.__getitem__)
    return work / seconds[best] / 1e12, ways[best].method


def _copy_in_torch(num_bytes: int, settings: Settings) -> list[Timer]:
    source = torch.ones(num_bytes // 4, device=settings.device)
    target = torch.zeros_like(source)
    return _torch_ways(lambda: target.copy_(source), settings)


def _matmul_in_torch(size: int, settings: Settings) -> list[Timer]:
    a, b = (torch.randn(size, size, device=settings.device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return _torch_ways(lambda: torch.matmul(a, b, out=out), settings)


def _torch_ways(call: Callable[[], Any], settings: Settings) -> list[Timer]:
    """A graph's copy need not be the one that a stream gets."""
    ways = [timers.of_torch([call], settings.device)]
    if settings.cuda:
        ways.append(timers.EventTimer([call]))
    return ways


def _copy_in_jax(num_bytes: int, settings: Settings) -> list[Timer]:
    """XLA's copy, and a kernel that reads and writes as much."""
    import jax
    import jax.numpy as jnp

    source = jnp.ones(num_bytes // 4, jnp.float32)
    programs = {"jitted copy": jax.jit(jnp.copy), "jitted sum with a number": jax.jit(lambda x: x + 1)}
    return [_jax_timer(name, program, source) for name, program in programs.items()]


def _matmul_in_jax(size: int, settings: Settings) -> list[Timer]:
    import jax
    import jax.numpy as jnp

    a, b = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in jax.random.split(jax.random.key(0)))
    return [_jax_timer("jitted matmul", jax.jit(jnp.matmul), a, b)]


def _jax_timer(name: str, program: Callable[..., Any], *arguments: Any) -> Timer:
    return timers.ProgramTimer(lambda: program(*arguments), 1, seconds=50e-3, program=name)
