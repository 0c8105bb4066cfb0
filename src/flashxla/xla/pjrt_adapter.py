"""JAX's PJRT plugin for NVIDIA GPUs, adapted for PyTorch/XLA 2.9 (csrc/pjrt).

Nothing here needs Torch or JAX: the plugin is a shared object that their packages bring.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flashxla import install, native

PLUGIN_VARIABLE = "FLASHXLA_PJRT_PLUGIN"
HOW_TO_INSTALL = (
    f"{install.command('torch-xla', 'cuda13')} (or cuda12), "
    f"or name the file of the plugin in {PLUGIN_VARIABLE}"
)
_PACKAGES = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
_FILE = "xla_cuda_plugin.so"
_WATCHER = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_size_t), ctypes.c_size_t)
# What the plugin opens by name when it starts; each may need those before it.
_NVIDIA_LIBRARIES = (
    "cudart",
    "nvrtc",
    "nvJitLink",
    "cublasLt",
    "cublas",
    "nccl",
    "cupti",
    "cusparse",
    "cusolver",
    "cufft",
    "nvshmem_host",
    "cudnn",
)


class PluginError(RuntimeError):
    """The plugin is missing or cannot be used; the message says why."""


def find_plugin() -> Path:
    """The plugin's file. Raises PluginError if there is none."""
    if path := os.environ.get(PLUGIN_VARIABLE):
        if not Path(path).is_file():
            raise PluginError(f"flashxla: {PLUGIN_VARIABLE}: got {path!r}, which is no file")
        return Path(path)
    for package in _PACKAGES:
        with contextlib.suppress(ModuleNotFoundError):
            spec = importlib.util.find_spec(package)
            for folder in (spec.submodule_search_locations if spec else None) or ():
                if (Path(folder) / _FILE).is_file():
                    return Path(folder) / _FILE
    raise PluginError(
        f"flashxla: PyTorch/XLA on NVIDIA GPUs needs JAX's PJRT plugin, jax-cuda13-pjrt or jax-cuda12-pjrt: "
        f"{HOW_TO_INSTALL}"
    )


class Adapter:
    """libflashxla_pjrt.so with a plugin loaded in it."""

    def __init__(self, path: Path, plugin: Path) -> None:
        self.path, self.plugin = path, plugin
        self._watchers: list[Any] = []
        self._cdll = ctypes.CDLL(str(path))
        self._cdll.flashxla_pjrt_load.restype = ctypes.c_char_p
        self._cdll.flashxla_pjrt_load.argtypes = (ctypes.c_char_p,)
        self._cdll.flashxla_pjrt_api_version.restype = ctypes.c_int64
        self._cdll.flashxla_pjrt_accepted_versions.restype = ctypes.c_char_p
        self._cdll.flashxla_pjrt_register_ffi.restype = ctypes.c_char_p
        self._cdll.flashxla_pjrt_register_ffi.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_char_p)
        self._cdll.flashxla_pjrt_set_option.argtypes = (
            ctypes.c_char_p,
            ctypes.c_int32,
            ctypes.c_void_p,
            ctypes.c_size_t,
        )
        self._cdll.flashxla_pjrt_set_option.restype = None
        self._cdll.flashxla_pjrt_watch_inputs.argtypes = (_WATCHER,)
        self._cdll.flashxla_pjrt_watch_inputs.restype = None
        self._cdll.flashxla_pjrt_provide_view.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._cdll.flashxla_pjrt_provide_view.restype = None
        self._cdll.flashxla_pjrt_withdraw_view.argtypes = (ctypes.c_void_p,)
        self._cdll.flashxla_pjrt_withdraw_view.restype = ctypes.c_int64
        if problem := self._cdll.flashxla_pjrt_load(str(plugin).encode()):
            raise PluginError(f"flashxla: the PJRT plugin can't be used: {problem.decode()}")

    @property
    def api_version(self) -> str:
        """The version of the PJRT C API that the plugin has."""
        return native.version_text(self._cdll.flashxla_pjrt_api_version())

    @property
    def accepted_versions(self) -> str:
        """Those that the adapter was made for."""
        return self._cdll.flashxla_pjrt_accepted_versions().decode()

    def register_ffi(self, targets: dict[str, int], platform: str = "CUDA") -> None:
        """Register typed-FFI handlers, name -> address, with the XLA runtime inside the plugin."""
        for name, handler in targets.items():
            problem = self._cdll.flashxla_pjrt_register_ffi(name.encode(), handler, platform.encode())
            if problem:
                raise PluginError(
                    f"flashxla: could not register its XLA custom calls with {self.plugin.name}: {problem.decode()}"
                )

    def set_options(self, options: Mapping[str, Any]) -> None:
        """Give the plugin these options when a framework creates its client: text, numbers, lists of integers."""
        for name, value in options.items():
            kind, array, size = _option(name, value)
            self._cdll.flashxla_pjrt_set_option(name.encode(), kind, ctypes.addressof(array), size)

    @contextlib.contextmanager
    def watch_inputs(self) -> Iterator[list[tuple[int, ...]]]:
        """Collect where the inputs of each program lie that starts in the block."""
        seen: list[tuple[int, ...]] = []
        watcher = _WATCHER(lambda addresses, count: seen.append(tuple(addresses[:count])))
        self._watchers.append(watcher)  # a program of another thread may call it after the block
        self._cdll.flashxla_pjrt_watch_inputs(watcher)
        try:
            yield seen
        finally:
            self._cdll.flashxla_pjrt_watch_inputs(_WATCHER())

    def provide_view(self, host_address: int, managed_tensor: int) -> None:
        """Let the next transfer of the host memory give a buffer that is a DLManagedTensor's memory, and owns it."""
        self._cdll.flashxla_pjrt_provide_view(host_address, managed_tensor)

    def withdraw_view(self, host_address: int) -> bool:
        """Whether such a transfer has not taken place; then it will not."""
        return bool(self._cdll.flashxla_pjrt_withdraw_view(host_address))


def _option(name: str, value: Any) -> tuple[int, Any, int]:
    """PJRT's number of a value's type, the value in memory, and its length."""
    if isinstance(value, str):
        text = value.encode()
        return 0, ctypes.create_string_buffer(text), len(text)
    if isinstance(value, bool):
        return 4, ctypes.c_bool(value), 1
    if isinstance(value, int):
        return 1, ctypes.c_int64(value), 1
    if isinstance(value, float):
        return 3, ctypes.c_float(value), 1
    if isinstance(value, list):
        return 2, (ctypes.c_int64 * len(value))(*value), len(value)
    raise TypeError(f"flashxla: {name}: got {value!r}; accepted: text, a number, or a list of integers")


@functools.cache
def load() -> Adapter:
    """The adapter, the plugin that is installed loaded in it. Raises PluginError."""
    plugin = find_plugin()
    _load_nvidia_libraries(plugin)
    return Adapter(native.library_path("pjrt"), plugin)


def _load_nvidia_libraries(plugin: Path) -> None:
    """Open NVIDIA's libraries where their packages have them: the plugin looks for their names only.

    A library that is missing here may be on the system's path; the plugin says so if it is not.
    """
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations if spec else None) or ()]
    # CUDA 13's packages share one folder, those of CUDA 12 have one each; some names are in both.
    folders = [folder for root in roots for folder in sorted(root.glob("*/lib"))]
    folders.sort(key=lambda folder: (folder.parent.name == "cu13") != ("cuda13" in str(plugin)))
    for name in _NVIDIA_LIBRARIES:
        for path in (path for folder in folders for path in sorted(folder.glob(f"lib{name}.so.*"))):
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(path))
