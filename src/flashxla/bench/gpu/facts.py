"""What the device is."""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

import torch

from flashxla.bench.gpu.settings import Settings


def device(settings: Settings) -> dict[str, Any]:
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
        found.update(_by_jax())
    for name in ("XLA_FLAGS", "FLASHXLA_CHECK"):
        if os.environ.get(name):
            found[name] = os.environ[name]
    found["packages"] = packages()
    return found


def _by_jax() -> dict[str, Any]:
    """What JAX knows of the GPU where PyTorch has no CUDA."""
    import jax

    device = jax.devices()[0]
    return {
        "name": device.device_kind,
        "capability": getattr(device, "compute_capability", None),
        "multiprocessors": getattr(device, "core_count", None),
        "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
    }


def packages() -> dict[str, str]:
    """NVIDIA's and JAX's packages, and Triton, by version."""
    versions = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if name.startswith(("nvidia-c", "jax-cuda", "triton")):
            versions[name] = distribution.version
    return dict(sorted(versions.items()))
