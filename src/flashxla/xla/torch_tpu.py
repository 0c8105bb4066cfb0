"""TorchTPU on other devices than TPUs: starting it.

TorchTPU is PyTorch's backend for XLA after PyTorch/XLA. Its wheels know TPUs alone, but it loads its PJRT plugin by the
path in TPU_LIBRARY_PATH: the adapter (csrc/pjrt), with JAX's CUDA plugin or a CPU plugin in it. Tensors keep the device
type "tpu".

Nothing here imports PyTorch before that variable is set: without it and without libtpu, `import torch` loads TorchTPU,
which aborts the process.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flashxla import install, native
from flashxla.platforms import CPU, CUDA, Platform
from flashxla.xla import hidden_gpus, pjrt_adapter

DEVICE = "tpu"
TORCH_KEY = "PrivateUse1"  # the dispatch key of its tensors
# Its packages need libtpu, which runs programs on TPUs alone.
HOW_TO_INSTALL = f"{install.command('torchtpu')}, then pip install --no-deps torch-tpu==0.2.0"
_LIBRARY_PATH = "TPU_LIBRARY_PATH"
# What the plugins' runtimes call their platforms in their registries of handlers.
_REGISTRIES = {CPU: "Host", CUDA: CUDA.jax_registry}
# By which TorchTPU knows that it is in a group of processes. It takes each for a host of a TPU slice, asks for the
# slice's topology, and ends the process where there is none. So it starts without knowing.
_GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_DEVICES = "visible_devices"
_started: dict[Platform, dict[str, Any]] = {}


def is_installed() -> bool:
    """Whether there is a TorchTPU to start."""
    return importlib.util.find_spec("torch_tpu") is not None


def platform() -> Platform | None:
    """Where TorchTPU runs by `start`; None before."""
    return next(iter(_started), None)


def start(function: str, platform: Platform, options: Mapping[str, Any]) -> None:
    """Start TorchTPU on the devices of the plugin that is installed for a platform.

    Args:
        function: what the user called, for messages.
        platform: where the plugin's programs run.
        options: of the plugin's client.

    Raises:
        RuntimeError: TorchTPU runs already, on another platform, with other options or with another plugin; or there
            is no plugin.
    """
    if _started.get(platform) == options:
        return
    adapter = pjrt_adapter.load()
    running = ", ".join(f"{p.name} with the options {o}" for p, o in _started.items())
    running = running or os.environ.get(_LIBRARY_PATH, str(adapter.path))
    if running != str(adapter.path):
        raise RuntimeError(f"flashxla.{function}: TorchTPU runs already, on {running}")
    _prepare_jax(platform)
    adapter.set_options(_numbered_from_0(function, options))
    adapter.register_ffi(native.library(platform.name).ffi_targets, _REGISTRIES[platform])
    os.environ[_LIBRARY_PATH] = str(adapter.path)
    with _of_one_process():
        loader = importlib.import_module("torch_tpu._loader")
        loader._init_device(DEVICE)  # load() would look for TPUs on the PCI bus first
    _prepare_torch(platform, adapter.plugin)
    _started[platform] = dict(options)


def _numbered_from_0(function: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, and no GPU whose number is not its place: TorchTPU compiles nothing for it."""
    devices = options.get(_DEVICES)
    if devices is None or [*devices] == [*range(len(devices))]:
        return dict(options)
    hidden_gpus.hide_others(function, devices)
    import jax

    config: Any = jax.config
    config.update("jax_cuda_visible_devices", "all")  # of those that are left
    return {name: value for name, value in options.items() if name != _DEVICES}


@contextlib.contextmanager
def _of_one_process() -> Iterator[None]:
    """Start TorchTPU in here, also in a group of processes."""
    hidden = {name: os.environ.pop(name) for name in _GROUP if name in os.environ}
    try:
        yield
        if hidden:  # which TorchTPU reads once, at its first tensor
            import torch

            torch.zeros(1, device=DEVICE).cpu()
    finally:
        os.environ.update(hidden)


def _prepare_jax(platform: Platform) -> None:
    """Import JAX, which lowers the operations, before TorchTPU compiles anything.

    JAX sets environment variables when it is imported. A thread of TorchTPU that starts a compiler's process at that
    moment fails: the list of variables that it hands on moves. And JAX would take TPU_LIBRARY_PATH for a TPU.
    """
    import jax

    config: Any = jax.config
    if not config.jax_platforms:
        names = dict.fromkeys((platform.jax_lowering, CPU.jax_lowering))
        config.update("jax_platforms", ",".join(names))


def _prepare_torch(platform: Platform, plugin: Path) -> None:
    import torch._dynamo
    from torch.compiler import config

    from flashxla.xla import torch_tpu_attention, torch_tpu_graphs, torch_tpu_processes

    torch_tpu_processes.register()
    torch_tpu_attention.install()
    torch_tpu_graphs.install()
    # TorchTPU's programs for dynamic graphs are for TPUs. So each shape gets a graph of its own, as in PyTorch/XLA.
    torch._dynamo.config.automatic_dynamic_shapes = False
    # PyTorch keeps compiled graphs on disk, and knows nothing of what a graph of the same operations depends on here.
    made_by = (install.version("flashxla"), platform.name, plugin, plugin.stat().st_mtime_ns)
    config.cache_key_tag += " ".join(map(str, ("flashxla", *made_by)))
