"""The device: what it is, and what it can do at best, measured in the same run: a copy and a matrix product."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import timers
from benchmarks.settings import Settings
from benchmarks.timers import Timer

COPY, MATMUL = "copy", "matmul"


def facts(settings: Settings) -> dict[str, Any]:
    """Name, memory, software."""
    found: dict[str, Any] = {"device": settings.device}
    if settings.cuda and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found.update(
            name=properties.name,
            capability=f"{properties.major}.{properties.minor}",
            multiprocessors=properties.multi_processor_count,
            memory_bytes=properties.total_memory,
            torch_cuda=torch.version.cuda,
            torch_cudnn=torch.backends.cudnn.version(),
        )
    elif settings.cuda:
        import jax

        device = jax.devices()[0]
        found.update(
            name=device.device_kind,
            capability=getattr(device, "compute_capability", None),
            multiprocessors=getattr(device, "core_count", None),
            memory_bytes=(device.memory_stats() or {}).get("bytes_limit"),
        )
    found.update({name: os.environ[name] for name in ("XLA_FLAGS", "FLASHXLA_CHECK") if os.environ.get(name)})
    installed = {one.metadata["Name"] or "": one.version for one in importlib.metadata.distributions()}
    prefixes = ("nvidia-c", "jax-cuda", "triton")
    found["packages"] = {name: installed[name] for name in sorted(installed) if name.startswith(prefixes)}
    return found


def ceilings(settings: Settings) -> dict[str, dict[str, Any]]:
    """Of the copy in TB/s (read + written), of the product in TFLOP/s; by JAX where PyTorch has no CUDA."""
    num_bytes, size = (2**20, 128) if settings.quick else (4 * 2**30, 8192)
    in_torch = not settings.cuda or torch.cuda.is_available()
    copy, product = (_copy_in_torch, _matmul_in_torch) if in_torch else (_copy_in_jax, _matmul_in_jax)
    found = {
        COPY: {
            "name": f"device to device copy of {num_bytes / 2**30:.3g} GiB, read + written",
            **_rate(copy(num_bytes, settings), 2.0 * num_bytes, settings),
            "unit": "TB/s",
        },
        MATMUL: {
            "name": f"matmul {size}^3 bfloat16, random numbers",
            **_rate(product(size, settings), 2.0 * size**3, settings),
            "unit": "TFLOP/s",
        },
    }
    free_memory(settings)
    return found


def _rate(ways: list[Timer], work: float, settings: Settings) -> dict[str, Any]:
    """Of the best way."""
    seconds = [statistics.median(way.sample() for _ in range(settings.rounds)) for way in ways]
    best = min(range(len(ways)), key=seconds.__getitem__)
    return {"rate": work / seconds[best] / 1e12, "method": ways[best].method}


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
    return [*ways, timers.EventTimer([call])] if settings.cuda else ways


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


def is_lost(settings: Settings) -> bool:
    """Whether a kernel did something after which this process can use the GPU no more."""
    if not settings.cuda:
        return False
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.zeros(1, device="cuda").item()
        else:
            import jax.numpy as jnp

            jnp.zeros(1).block_until_ready()
    except RuntimeError:
        return True
    return False


def free_memory(settings: Settings) -> None:
    """Give back what the last case held."""
    gc.collect()
    if settings.cuda and torch.cuda.is_available():
        torch.cuda.empty_cache()
