"""Which device PyTorch/XLA runs on, and how much of it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from flashxla.platforms import CPU, CUDA
from flashxla.xla import gpu

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_VARIABLE = "PJRT_DEVICE"
_ACCEPTED = (CPU.torch_xla_device, CUDA.torch_xla_device)
_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_XLA_DEFAULT_FRACTION = 0.75


def choose(vllm_config: VllmConfig) -> None:
    """Set what processes started from here inherit: PJRT_DEVICE, and on a GPU the memory that XLA may allocate.

    PyTorch/XLA does not start, since vLLM may fork.

    Raises:
        ValueError: PJRT_DEVICE names another device.
    """
    device = os.environ.setdefault(_VARIABLE, _default())
    if device not in _ACCEPTED:
        raise ValueError(
            f"flashxla-vllm-legacy: {_VARIABLE}: got {device!r}; accepted: {' or '.join(_ACCEPTED)}"
        )
    if is_gpu() and not any(name in os.environ for name in _FRACTIONS):
        gpu.use_gpu(memory_fraction=vllm_config.cache_config.gpu_memory_utilization)


def memory_fraction() -> float:
    """The share of the GPU's memory that XLA may allocate."""
    return next((float(os.environ[name]) for name in _FRACTIONS if name in os.environ), _XLA_DEFAULT_FRACTION)


def is_gpu() -> bool:
    """Whether PyTorch/XLA runs on a GPU."""
    return os.environ.get(_VARIABLE) == CUDA.torch_xla_device


def _default() -> str:
    return CUDA.torch_xla_device if gpu.count(os.environ) else CPU.torch_xla_device
