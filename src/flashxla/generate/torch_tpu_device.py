"""TorchTPU's device, started once, before PyTorch is imported."""

from __future__ import annotations

import os

from flashxla.generate.errors import GenerateError, describe
from flashxla.platforms import CPU
from flashxla.xla import cpu, gpu, torch_tpu

_STARTS = {"CPU": cpu.use_cpu, gpu.DEVICE: gpu.use_gpu}


def start() -> None:
    """Start TorchTPU where PJRT_DEVICE says, without it on the CPU. Raises GenerateError."""
    if not torch_tpu.is_installed():
        raise GenerateError(f"--frontend: torchtpu needs TorchTPU: {torch_tpu.HOW_TO_INSTALL}")
    device = os.environ.get("PJRT_DEVICE", "CPU")
    if device not in _STARTS:
        raise GenerateError(f"PJRT_DEVICE: got {device!r}; accepted: {', '.join(_STARTS)}")
    try:
        _STARTS[device]()
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        reason = str(error).removeprefix("flashxla: ") or describe(error)
        raise GenerateError(f"PJRT_DEVICE: got {device!r}, which could not be started: {reason}") from error


def is_cpu() -> bool:
    """Whether the device is a CPU."""
    return torch_tpu.platform() == CPU
