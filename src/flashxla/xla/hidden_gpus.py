"""Hiding GPUs from CUDA, for runtimes that take no device whose number is not its place.

XLA gives a GPU the number that CUDA gives it. Who has the second one alone finds a device 1, and no device 0.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

_VARIABLE = "CUDA_VISIBLE_DEVICES"
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED


def hide_others(function: str, devices: Sequence[int]) -> None:
    """Leave this process these GPUs alone, by CUDA_VISIBLE_DEVICES.

    CUDA, PyTorch and JAX then number them from 0, in this process and in those that it starts.

    Args:
        function: what the user called, for messages.
        devices: CUDA's numbers of the GPUs.

    Raises:
        RuntimeError: CUDA runs in this process already, and does not look at its variable again.
        ValueError: the variable names fewer GPUs.
    """
    if _cuda_runs():
        raise RuntimeError(
            f"flashxla.{function}: CUDA runs in this process already, with all GPUs; call {function} before anything "
            f"uses a GPU, or set {_VARIABLE} to {','.join(map(str, devices))} before the program starts"
        )
    names = [str(device) for device in devices]
    if (given := os.environ.get(_VARIABLE)) is not None:
        seen = given.split(",")
        if max(devices) >= len(seen):
            raise ValueError(
                f"flashxla.{function}: visible_devices: got {[*devices]}; accepted: numbers below {len(seen)}, as "
                f"{_VARIABLE} is {given!r}"
            )
        names = [seen[device] for device in devices]
    os.environ[_VARIABLE] = ",".join(names)


def _cuda_runs() -> bool:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return bool(driver.cuDeviceGetCount(ctypes.byref(count)) != _NOT_INITIALIZED)
