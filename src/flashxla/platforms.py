"""The platforms that a native library exists for, in one table."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Platform:
    """Where operations run.

    name: of its library, libflashxla_<name>.so, and of the C functions flashxla_<name>_<operation>.
    how_to_build: what to do where the library is missing.
    packages: those that bring the library, beside flashxla itself; the first one that is installed counts.
    torch_key: the dispatch key of PyTorch's tensors; torch_device: their device type.
    jax_lowering: JAX's name of it in lowering; jax_backend: of its backend; jax_registry: in the registry of handlers.
    torch_xla_device: PJRT_DEVICE of PyTorch/XLA.
    fence: custom calls must be kept apart from slices of what they update and return (jax_calls).
    """

    name: str
    how_to_build: str
    torch_key: str
    torch_device: str
    jax_lowering: str
    jax_backend: str
    jax_registry: str
    torch_xla_device: str
    fence: bool = False
    packages: tuple[str, ...] = ()


CPU = Platform(
    name="cpu",
    how_to_build="build it with 'make build'",
    torch_key="CPU",
    torch_device="cpu",
    jax_lowering="cpu",
    jax_backend="cpu",
    jax_registry="cpu",
    torch_xla_device="CPU",
)
CUDA = Platform(
    name="cuda",
    how_to_build="build it with 'make cuda', or install a flashxla-cuda wheel made by 'make wheel-cuda'",
    torch_key="CUDA",
    torch_device="cuda",
    jax_lowering="cuda",
    jax_backend="gpu",
    jax_registry="CUDA",
    torch_xla_device="CUDA",
    fence=True,
    packages=("flashxla-cuda13", "flashxla-cuda12"),
)
PLATFORMS = {platform.name: platform for platform in (CPU, CUDA)}
