"""Registers the custom call targets with the XLA runtimes that are loaded.

A process can hold several: jaxlib's (CPU), the one inside torch_xla (CPU), and that of a CUDA PJRT plugin. Each
has a registry of its own, and each is registered with once.
"""

from __future__ import annotations

import ctypes
import functools
import sys

from flashxla import native


@functools.cache
def register_jax() -> None:
    """Register with jaxlib's CPU runtime and, if the library for it is installed, JAX's CUDA plugin.

    The plugin need not be there: JAX keeps the registration for when it is loaded.
    """
    import jax

    platforms = {"cpu": "cpu", "cuda": "CUDA"}
    for platform, jax_name in platforms.items():
        if platform == "cuda" and not native.is_installed("cuda"):
            continue
        for name, address in native.library(platform).ffi_targets.items():
            handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address)
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform=jax_name)


@functools.cache
def register_torch_xla() -> None:
    """Register with the XLA:CPU runtime inside torch_xla."""
    from flashxla.xla import torch_xla_runtime

    native.library("cpu").register_ffi(torch_xla_runtime.ffi_api(), "Host")


def register_loaded() -> None:
    """Register with every XLA runtime that this process has loaded."""
    if "jax" in sys.modules:
        register_jax()
    if "torch_xla" in sys.modules:
        register_torch_xla()
