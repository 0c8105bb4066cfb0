"""Registers the custom call targets with the XLA runtimes that are loaded.

A process can hold several: jaxlib's (CPU), the one inside torch_xla (CPU), and that of a CUDA PJRT plugin. Each
has a registry of its own, and each is registered with once.
"""

from __future__ import annotations

import ctypes
import functools
import sys

from flashxla import native
from flashxla.platforms import CPU, PLATFORMS

_TORCH_XLA_PLATFORMS = {platform.torch_xla_device: platform.name for platform in PLATFORMS.values()}


def targets() -> set[str]:
    """The custom call targets of every platform whose library is installed."""
    return {name for p in PLATFORMS if native.is_installed(p) for name in native.library(p).ffi_targets}


@functools.cache
def register_jax() -> None:
    """Register with jaxlib's CPU runtime and, if the library for it is installed, JAX's CUDA plugin.

    The plugin need not be there: JAX keeps the registration for when it is loaded.
    """
    import jax

    for platform in PLATFORMS.values():
        if platform is not CPU and not native.is_installed(platform.name):
            continue
        for name, address in native.library(platform.name).ffi_targets.items():
            handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address)
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform=platform.jax_registry)


def torch_xla_platform() -> str:
    """The platform that PyTorch/XLA runs on: "cpu" or "cuda". Raises RuntimeError for others."""
    import torch_xla.runtime

    device = torch_xla.runtime.device_type()
    if device not in _TORCH_XLA_PLATFORMS:
        raise RuntimeError(
            f"flashxla: PJRT_DEVICE: got {device!r}; accepted: {', '.join(map(repr, _TORCH_XLA_PLATFORMS))}"
        )
    return _TORCH_XLA_PLATFORMS[device]


def register_torch_xla() -> None:
    """Register with the XLA runtime of PyTorch/XLA: that inside torch_xla (CPU), or inside the CUDA plugin."""
    register_torch_xla_on(torch_xla_platform())


@functools.cache
def register_torch_xla_on(platform: str) -> None:
    """The same for a platform, "cpu" or "cuda", whichever PyTorch/XLA runs on."""
    if platform == "cuda":
        from flashxla.xla import pjrt_adapter

        pjrt_adapter.load().register_ffi(native.library("cuda").ffi_targets)
    else:
        from flashxla.xla import torch_xla_runtime

        native.library("cpu").register_ffi(torch_xla_runtime.ffi_api(), "Host")


def register_all() -> None:
    """Register with JAX, and with PyTorch/XLA if this process has loaded it."""
    register_jax()
    if "torch_xla" in sys.modules:
        register_torch_xla()
