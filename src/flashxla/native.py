"""The native libraries: finding them, and calling the C ABI (csrc/include/flashxla).

They are plain shared objects without a Python ABI, so one build serves every Python. Each operation's argument
struct is mirrored here from its `Native` declaration; nothing in this module knows Torch or XLA.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flashxla.ops.attention import ATTENTION, ATTENTION_PLAN
from flashxla.ops.kv_cache import KV_CACHE
from flashxla.ops.merge_states import MERGE_STATES
from flashxla.ops.op import Native

NATIVES = (KV_CACHE, ATTENTION, MERGE_STATES)
# What a platform's library has beside them.
MORE_NATIVES: dict[str, tuple[Native, ...]] = {"cpu": (), "cuda": (ATTENTION_PLAN,)}
HOW_TO_BUILD = {
    "cpu": "build it with 'make build'",
    "cuda": "build it with 'make cuda', or install a wheel made by 'make wheel CUDA=1'",
}
MAX_RANK = 5
_OK, _INVALID_ARGUMENT, _OUT_OF_MEMORY = 0, 1, 2
# An empty tensor may have no address, yet it is present; as well aligned as one of a framework.
_ALIGNMENT = 256
_EMPTY = ctypes.create_string_buffer(2 * _ALIGNMENT)
_EMPTY_ADDRESS = -(-ctypes.addressof(_EMPTY) // _ALIGNMENT) * _ALIGNMENT


class CTensor(ctypes.Structure):
    """flashxla_tensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("shape", ctypes.c_int64 * MAX_RANK),
        ("stride", ctypes.c_int64 * MAX_RANK),
    )

    @classmethod
    def of(cls, dtype: int, shape: Iterable[int], stride: Iterable[int] | None = None) -> CTensor:
        """A tensor but for its address; strides in elements, None for a dense row-major one."""
        tensor = cls()
        shape = tuple(shape)
        if stride is None:
            stride = (math.prod(shape[i + 1 :]) for i in range(len(shape)))
        tensor.dtype, tensor.rank = dtype, len(shape)
        tensor.shape[: len(shape)] = shape
        tensor.stride[: len(shape)] = tuple(stride)
        return tensor

    @property
    def address(self) -> int:
        """Where the data is."""
        return self.data

    @address.setter
    def address(self, address: int) -> None:
        self.data = address or _EMPTY_ADDRESS


class CContext(ctypes.Structure):
    """flashxla_context."""

    _fields_ = (
        ("parallel_for", ctypes.c_void_p),
        ("pool", ctypes.c_void_p),
        ("num_threads", ctypes.c_int64),
        ("stream", ctypes.c_void_p),
        ("check_indices", ctypes.c_int64),
    )


class CAttentionNeeds(ctypes.Structure):
    """flashxla_attention_needs."""

    _fields_ = (
        ("plan_words", ctypes.c_int64),
        ("workspace_bytes", ctypes.c_int64),
        ("engines", ctypes.c_int64),
        ("few_queries", ctypes.c_char_p),
        ("many_queries", ctypes.c_char_p),
        ("reason", ctypes.c_char_p),
    )


class AttentionNeeds(NamedTuple):
    """What a call of attention on a GPU needs, and which engines serve it (csrc/include/flashxla/attention.h).

    workspace_bytes: without a plan; with one, its bytes less.
    """

    plan_words: int
    workspace_bytes: int
    engines: int
    few_queries: str
    many_queries: str
    reason: str

    @property
    def bytes_with_a_plan(self) -> int:
        """The workspace of a call that is given its plan."""
        return self.workspace_bytes - 4 * self.plan_words


@functools.cache
def args_struct(native: Native) -> type[ctypes.Structure]:
    """flashxla_<name>_args: inputs, then results that are not inputs too, then integers and floats."""
    tensors = dict.fromkeys((*native.inputs, *native.results))
    fields: list[tuple[str, Any]] = [(name, CTensor) for name in tensors]
    fields += [(name, ctypes.c_int64) for name in native.integers]
    fields += [(name, ctypes.c_double) for name in native.floats]
    return type(f"flashxla_{native.name}_args", (ctypes.Structure,), {"_fields_": fields})


class Library:
    """One platform's native library, "cpu" or "cuda"."""

    def __init__(self, platform: str, path: Path) -> None:
        self.platform = platform
        self.path = path
        self._cdll = ctypes.CDLL(str(path))
        self._cdll.flashxla_last_error.restype = ctypes.c_char_p
        self._cdll.flashxla_check_indices.restype = ctypes.c_int64
        self._functions = {}
        for native in (*NATIVES, *MORE_NATIVES[platform]):
            function = self._cdll[f"flashxla_{platform}_{native.name}"]
            function.argtypes = (ctypes.POINTER(args_struct(native)), ctypes.POINTER(CContext))
            self._functions[native] = function
        self._cdll.flashxla_ffi_target_name.restype = ctypes.c_char_p
        self._cdll.flashxla_ffi_target_name.argtypes = (ctypes.c_int64,)
        self._cdll.flashxla_ffi_target_handler.restype = ctypes.c_void_p
        self._cdll.flashxla_ffi_target_handler.argtypes = (ctypes.c_int64,)
        self._cdll.flashxla_ffi_register.restype = ctypes.c_char_p
        self._cdll.flashxla_ffi_register.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
        self._cdll.flashxla_ffi_api_version.restype = ctypes.c_int64
        self._cdll.flashxla_ffi_runtime_api_version.restype = ctypes.c_int64
        self._cdll.flashxla_ffi_runtime_api_version.argtypes = (ctypes.c_void_p,)

    @functools.cached_property
    def check_indices(self) -> bool:
        """Whether FLASHXLA_CHECK=1: bad index tensors raise instead of being skipped."""
        return bool(self._cdll.flashxla_check_indices())

    def arguments(
        self, native: Native, tensors: Mapping[str, CTensor], attributes: Mapping[str, int | float]
    ) -> ctypes.Structure:
        """The argument struct of an operation."""
        args = args_struct(native)()
        for name, value in (*tensors.items(), *attributes.items()):
            setattr(args, name, value)
        return args

    def run(self, native: Native, args: ctypes.Structure, **context: int | None) -> str | None:
        """Run an operation. Returns None, or the message of an invalid argument.

        context: fields of CContext. Raises MemoryError, and RuntimeError for a failure of the device.
        """
        status = self._functions[native](args, CContext(check_indices=self.check_indices, **context))
        if status == _OK:
            return None
        message = (self._cdll.flashxla_last_error() or b"").decode()
        if status == _INVALID_ARGUMENT:
            return message
        raise (MemoryError if status == _OUT_OF_MEMORY else RuntimeError)(f"flashxla: {message}")

    def attention_needs(
        self, tensors: Mapping[str, CTensor], attributes: Mapping[str, int | float]
    ) -> AttentionNeeds:
        """What a call of attention needs; only of the cuda library. The tensors need no address."""
        args = self.arguments(ATTENTION, tensors, attributes)
        for slot in tensors:
            getattr(args, slot).address = 0
        function = self._cdll[f"flashxla_{self.platform}_attention_needs"]
        function.argtypes = (ctypes.POINTER(args_struct(ATTENTION)), ctypes.POINTER(CAttentionNeeds))
        needs = CAttentionNeeds()
        if status := function(args, needs):
            message = (self._cdll.flashxla_last_error() or b"").decode()
            raise (ValueError if status == _INVALID_ARGUMENT else RuntimeError)(message)
        names = (needs.few_queries, needs.many_queries, needs.reason)
        few, many, reason = ((name or b"").decode() for name in names)
        return AttentionNeeds(needs.plan_words, needs.workspace_bytes, needs.engines, few, many, reason)

    @functools.cached_property
    def instruction_set(self) -> str:
        """What the kernels use of this machine's processor; only of the cpu library.

        Raises ValueError if FLASHXLA_CPU_ISA names what does not run here.
        """
        self._cdll.flashxla_cpu_instruction_set.restype = ctypes.c_char_p
        name = self._cdll.flashxla_cpu_instruction_set()
        if name is None:
            raise ValueError(self._cdll.flashxla_last_error().decode())
        return name.decode()

    @functools.cached_property
    def ffi_targets(self) -> dict[str, int]:
        """The XLA custom call targets: name -> address of the typed-FFI handler."""
        targets: dict[str, int] = {}
        while name := self._cdll.flashxla_ffi_target_name(len(targets)):
            targets[name.decode()] = self._cdll.flashxla_ffi_target_handler(len(targets))
        return targets

    def register_ffi(self, api: int, platform: str) -> None:
        """Register every target with the XLA runtime whose XLA_FFI_Api* is `api`."""
        error = self._cdll.flashxla_ffi_register(api, platform.encode())
        if error:
            raise RuntimeError(
                f"flashxla: could not register its XLA custom calls (FFI API {self.ffi_api_version}) with a "
                f"runtime of FFI API {self.runtime_api_version(api)}: {error.decode()}"
            )

    @property
    def ffi_api_version(self) -> str:
        """The XLA FFI API version that the handlers were built with."""
        return version_text(self._cdll.flashxla_ffi_api_version())

    def runtime_api_version(self, api: int) -> str:
        """The XLA FFI API version of the runtime behind an XLA_FFI_Api*."""
        return version_text(self._cdll.flashxla_ffi_runtime_api_version(api))


def version_text(number: int) -> str:
    """1 * 1000 + 2 -> "1.2"."""
    return f"{number // 1000}.{number % 1000}"


def _folders() -> Iterable[Path]:
    if folder := os.environ.get("FLASHXLA_LIBRARY_DIR"):
        yield Path(folder)
        return
    yield Path(__file__).parent / "lib"
    # An editable install keeps the Python files in the checkout and the libraries in site-packages.
    yield Path(sysconfig.get_path("purelib")) / "flashxla" / "lib"


def _places(name: str) -> list[Path]:
    """Where the file of a library may be."""
    return [folder / f"libflashxla_{name}.so" for folder in _folders()]


@functools.cache
def is_installed(platform: str) -> bool:
    """Whether the library of a platform is there."""
    return any(path.exists() for path in _places(platform))


def library_path(name: str) -> Path:
    """The file of a library: of a platform, or "pjrt". Raises ImportError if it is not installed."""
    places = _places(name)
    for path in places:
        if path.exists():
            return path
    raise ImportError(
        f"flashxla: {places[0].name} not found in {', '.join(str(path.parent) for path in places)}; "
        f"{HOW_TO_BUILD.get(name, HOW_TO_BUILD['cpu'])}"
    )


@functools.cache
def library(platform: str) -> Library:
    """The library of a platform, "cpu" or "cuda". Raises ImportError if it is not installed."""
    return Library(platform, library_path(platform))
