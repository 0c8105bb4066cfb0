"""PyTorch/XLA on NVIDIA GPUs: choosing them, and the options of the runtime by the names that JAX gives them."""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flashxla.platforms import CUDA
from flashxla.xla import pjrt_adapter, torch_tpu

DEVICE = CUDA.torch_xla_device
ALLOCATORS = ("default", "platform", "bfc", "cuda_async", "vmm")
_MEMORY_FRACTION = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
_VISIBLE_DEVICES = "JAX_CUDA_VISIBLE_DEVICES"


class Place(NamedTuple):
    """A process among those that work together, each with a GPU of its own."""

    rank: int
    size: int
    local_rank: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Place:
        """As torch_xla.launch or torchrun tell it."""

        def number(default: int, *names: str) -> int:
            return next((int(environment[name]) for name in names if name in environment), default)

        local_rank = number(0, "PJRT_LOCAL_PROCESS_RANK", "LOCAL_RANK")
        local_size = number(1, "PJRT_LOCAL_PROCESS_COUNT", "LOCAL_WORLD_SIZE")
        return cls(number(local_rank, "RANK"), number(local_size, "WORLD_SIZE"), local_rank)


def use_gpu(
    *,
    memory_fraction: float | None = None,
    preallocate: bool | None = None,
    visible_devices: Sequence[int] | None = None,
    allocator: str | None = None,
) -> None:
    """Run PyTorch/XLA, or TorchTPU where that is installed, on this machine's NVIDIA GPUs, through JAX's CUDA plugin.

    Call it before the first XLA device is used. For PyTorch/XLA it is PJRT_DEVICE=CUDA as a call; TorchTPU's tensors
    have the device "tpu" here, too. What it sets are environment variables, which processes started from here inherit.
    An option that is not given keeps what its variable says, else XLA's default. With TorchTPU it also sets
    torch._dynamo.config.automatic_dynamic_shapes to False: each shape is a graph of its own.

    Args:
        memory_fraction: share of the GPU's memory for XLA's allocator (XLA_CLIENT_MEM_FRACTION); XLA's default
            is 0.75.
        preallocate: take that memory at once (XLA_PYTHON_CLIENT_PREALLOCATE); XLA's default is True.
        visible_devices: the GPUs to use, by number (JAX_CUDA_VISIBLE_DEVICES). With TorchTPU the others are hidden
            from CUDA (CUDA_VISIBLE_DEVICES) where these are not the first ones.
        allocator: "default", "platform", "bfc", "cuda_async" or "vmm" (XLA_PYTHON_CLIENT_ALLOCATOR).

    Raises:
        RuntimeError: PyTorch/XLA or TorchTPU has started already, JAX's CUDA plugin is not installed, or CUDA runs
            already where TorchTPU needs GPUs hidden from it.
        ValueError: an option's value.
    """
    if "torch_xla" in sys.modules and sys.modules["torch_xla"]._XLAC._xla_runtime_is_initialized():
        raise RuntimeError(
            f"flashxla.use_gpu: PyTorch/XLA runs already, on {os.environ.get('PJRT_DEVICE')}; call use_gpu before "
            "the first XLA device is used"
        )
    variables = {"PJRT_DEVICE": DEVICE}
    if memory_fraction is not None:
        # JAX refuses both names at once.
        name = next((name for name in _MEMORY_FRACTION if name in os.environ), _MEMORY_FRACTION[0])
        variables[name] = str(memory_fraction)
    if preallocate is not None:
        variables[_PREALLOCATE] = "true" if preallocate else "false"
    if visible_devices is not None:
        variables[_VISIBLE_DEVICES] = ",".join(map(str, visible_devices))
    if allocator is not None:
        variables[_ALLOCATOR] = allocator
    options = client_options({**os.environ, **variables})
    # Before PyTorch/XLA starts: where it has failed to, it aborts the process at the next attempt.
    pjrt_adapter.find_plugin()
    if torch_tpu.is_installed():
        torch_tpu.start("use_gpu", CUDA, options)
    os.environ.update(variables)


def client_options(environment: Mapping[str, str]) -> dict[str, Any]:
    """The plugin's options for this process. Raises ValueError for a value that none takes."""
    options: dict[str, Any] = {"platform_name": "cuda"}
    allocator = environment.get(_ALLOCATOR, "default").lower()
    if allocator not in ALLOCATORS:
        raise ValueError(
            f"flashxla: {_ALLOCATOR} (allocator): got {allocator!r}; accepted: {', '.join(ALLOCATORS)}"
        )
    options["allocator"] = allocator
    for name in _MEMORY_FRACTION:
        if text := environment.get(name):
            options["memory_fraction"] = _fraction(name, text)
            break
    if text := environment.get(_PREALLOCATE):
        options["preallocate"] = text.lower() not in ("false", "0")
    if (own := devices_of_process(environment)) is not None:
        options["visible_devices"] = own
    return options


def visible_devices(environment: Mapping[str, str]) -> list[int] | None:
    """The GPUs that JAX_CUDA_VISIBLE_DEVICES names, None for all."""
    text = environment.get(_VISIBLE_DEVICES, "all")
    if text == "all":
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"flashxla: {_VISIBLE_DEVICES} (visible_devices): got {text!r}; accepted: numbers such as 0,1, or all"
        ) from None


def devices_of_process(environment: Mapping[str, str]) -> list[int] | None:
    """CUDA's numbers of a process's GPUs, in the order of its XLA devices; None for all.

    In a group of processes each takes the GPU of its local rank.
    """
    visible, place = visible_devices(environment), Place.of(environment)
    if place.size == 1:
        return visible
    if visible and place.local_rank >= len(visible):
        raise ValueError(
            f"flashxla: {_VISIBLE_DEVICES} (visible_devices): got {len(visible)} GPUs; accepted: one "
            f"for each process of this host, of which this is number {place.local_rank}"
        )
    return [visible[place.local_rank] if visible else place.local_rank]


def count(environment: Mapping[str, str]) -> int:
    """How many GPUs a CUDA program in this environment sees. Starts no CUDA in this process."""
    if (visible := visible_devices(environment)) is not None:
        return len(visible)
    if (text := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([part for part in text.split(",") if part.strip() not in ("", "-1")])
    number = ctypes.c_uint()
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(number)):
        return 0
    nvml.nvmlShutdown()
    return number.value


def _fraction(name: str, text: str) -> float:
    try:
        fraction = float(text)
    except ValueError:
        fraction = -1.0
    # Above 1 is for memory that the driver moves between host and device.
    if not 0 < fraction < math.inf:
        raise ValueError(f"flashxla: {name} (memory_fraction): got {text!r}; accepted: a number above 0")
    return fraction
