"""PyTorch/XLA's device, started once."""

from __future__ import annotations

import os
from types import ModuleType

from flashxla import install
from flashxla.generate.errors import GenerateError, describe
from flashxla.xla import gpu, pjrt_adapter


def start() -> ModuleType:
    """PyTorch/XLA with its device started. Raises GenerateError where that cannot be."""
    try:
        import torch_xla
    except ModuleNotFoundError as error:
        raise GenerateError(
            f"--frontend: lazy and openxla need PyTorch/XLA: {install.command('generate', 'torch-xla')}; "
            "--frontend torch does without"
        ) from error
    try:
        if os.environ.get("PJRT_DEVICE") == gpu.DEVICE:
            # PyTorch/XLA may end the process when it is asked for a device again after a start that failed.
            pjrt_adapter.load()
        torch_xla.device()
    except pjrt_adapter.PluginError as error:
        raise _no_device(str(error).removeprefix("flashxla: ")) from error
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise _no_device(describe(error)) from error
    return torch_xla


def _no_device(reason: str) -> GenerateError:
    return GenerateError(
        f"PJRT_DEVICE: got {os.environ.get('PJRT_DEVICE')!r}, which could not be started: {reason}; accepted: CPU, "
        "or CUDA where JAX's plugin and a GPU are (docs/pytorch-xla-gpu.md)"
    )


def is_cpu() -> bool:
    """Whether the device is a CPU."""
    import torch_xla.runtime

    return torch_xla.runtime.device_type() == "CPU"


def compile_count() -> int:
    """How many programs XLA has compiled in this process."""
    from torch_xla.debug import metrics

    data = metrics.metric_data("CompileTime")
    return 0 if data is None else int(data[0])
