"""The native libraries: finding them, and calling the C ABI (csrc/include/flashxla).

They are plain shared objects without a Python ABI, so one build serves every Python. Nothing in this module knows
Torch or XLA, or any operation: a library says itself which operations it has, and how their structs are laid out.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import math
import os
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flashxla import install
from flashxla.platforms import CPU, PLATFORMS
from flashxla.records import Operation, Records

_SELF = "flashxla"  # this package, as pip knows it
_OK, _INVALID_ARGUMENT, _OUT_OF_MEMORY = 0, 1, 2
# An empty tensor may have no address, yet it is present; as well aligned as one of a framework.
_ALIGNMENT = 256
_EMPTY = ctypes.create_string_buffer(2 * _ALIGNMENT)
SOME_ADDRESS = -(-ctypes.addressof(_EMPTY) // _ALIGNMENT) * _ALIGNMENT


class Spec(NamedTuple):
    """A tensor without its address: dtype name, shape, and strides in elements (None: dense, row-major)."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None


class Kernel(NamedTuple):
    """A kernel that serves a call (flashxla_kernel).

    work: what of the call, such as "few queries"; reason: why the fastest kernel for it cannot serve it.
    """

    work: str
    name: str
    description: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.description}"


class Needs(NamedTuple):
    """What a call needs beside its arguments, and which kernels serve it (flashxla_needs)."""

    plan_bytes: int
    workspace_bytes: int
    kernels: tuple[Kernel, ...]


class Library:
    """The native library of a platform, by the platform's name."""

    def __init__(self, platform: str, path: Path) -> None:
        self.platform = platform
        self.path = path
        self._cdll = ctypes.CDLL(str(path))
        try:
            self._declare()
            self.records = Records(json.loads(self._cdll.flashxla_describe()))
        except AttributeError:
            raise ImportError(
                f"flashxla: {path.name} is of an older version of flashxla; {PLATFORMS[platform].how_to_build}"
            ) from None
        self._functions = {}
        for operation in self.records.operations.values():
            function = self._cdll[f"flashxla_{platform}_{operation.name}"]
            function.argtypes = (
                ctypes.POINTER(operation.arguments),
                ctypes.POINTER(self.records.context),
            )
            self._functions[operation.name] = function

    def _declare(self) -> None:
        """Tell ctypes the types of the functions that every library has. Raises AttributeError if one is missing."""
        self._cdll.flashxla_describe.restype = ctypes.c_char_p
        self._cdll.flashxla_last_error.restype = ctypes.c_char_p
        self._cdll.flashxla_check_indices.restype = ctypes.c_int64
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
        """Whether FLASHXLA_CHECK=1: bad index tensors raise instead of being skipped. As `is_checking`, read once."""
        return bool(self._cdll.flashxla_check_indices())

    def operation(self, name: str) -> Operation:
        """An operation of this library."""
        return self.records.operations[name]

    def tensor(self, spec: Spec) -> ctypes.Structure:
        """A flashxla_tensor, at an address that nobody reads."""
        shape = tuple(spec.shape)
        stride = spec.stride
        if stride is None:
            stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        tensor: Any = self.records.tensor()
        tensor.data, tensor.dtype, tensor.rank = SOME_ADDRESS, self.records.dtypes[spec.dtype], len(shape)
        tensor.shape[: len(shape)] = shape
        tensor.stride[: len(shape)] = stride
        return tensor

    def scalar(self, operation: str, field: str, value: float | str) -> int | float:
        """A scalar as the C ABI has it: layouts and dtypes are named by their callers."""
        codes = {"layout": self.records.layouts, "dtype": self.records.dtypes}
        table = codes.get(self.operation(operation).fields[field].kind)
        return table[str(value)] if table else value  # type: ignore[return-value]

    def arguments(
        self, operation: str, tensors: Mapping[str, Spec], scalars: Mapping[str, float | str]
    ) -> ctypes.Structure:
        """The arguments of an operation, by field; the tensors' addresses are to be filled in."""
        args = self.operation(operation).arguments()
        for field, spec in tensors.items():
            setattr(args, field, self.tensor(spec))
        for field, value in scalars.items():
            setattr(args, field, self.scalar(operation, field, value))
        return args

    def run(self, operation: str, args: ctypes.Structure, **context: int | None) -> str | None:
        """Run an operation. Returns None, or the message of an invalid argument.

        context: fields of flashxla_context. Raises MemoryError, and RuntimeError for a failure of the device.
        """
        context_record = self.records.context(check_indices=self.check_indices, **context)
        status = self._functions[operation](args, context_record)
        return None if status == _OK else self._problem(status)

    def _problem(self, status: int) -> str:
        message = (self._cdll.flashxla_last_error() or b"").decode()
        if status == _INVALID_ARGUMENT:
            return message
        raise (MemoryError if status == _OUT_OF_MEMORY else RuntimeError)(f"flashxla: {message}")

    def bound(
        self, operation: str, args: ctypes.Structure, tensors: Sequence[str], context: str, **fixed: int
    ) -> Callable[[Iterable[int], int], str | None]:
        """An operation with arguments that stay, but for the addresses of `tensors` and a field of flashxla_context.

        fixed: other fields of flashxla_context. Returns a function of these addresses, in order, and that field; as
        `run`. Much faster than `run`.
        """
        places = [
            _word(getattr(type(args), name).offset + self.records.tensor.data.offset) for name in tensors
        ]
        place = _word(getattr(self.records.context, context).offset)
        function = self._functions[operation]
        free: list[tuple[Any, Any, Any, Any]] = []  # records that no thread uses now, and their words

        def run(addresses: Iterable[int], value: int) -> str | None:
            try:
                records = free.pop()
            except IndexError:
                own = type(args).from_buffer_copy(args)
                own_context = self.records.context(check_indices=self.check_indices, **fixed)
                records = (own, own_context, _words(own), _words(own_context))
            own, own_context, words, context_words = records
            for i, address in zip(places, addresses, strict=True):
                words[i] = address
            context_words[place] = value
            status = function(own, own_context)
            free.append(records)
            return None if status == _OK else self._problem(status)

        return run

    def needs(self, operation: str, args: ctypes.Structure) -> Needs:
        """What a call needs. Raises ValueError for arguments that the kernels do not take."""
        record: Any = self.records.needs()
        if problem := self.run(operation, args, needs=ctypes.addressof(record)):
            raise ValueError(problem)
        kernels = tuple(
            Kernel(*(text.decode() for text in (k.work, k.name, k.description, k.reason)))
            for k in record.kernels[: record.num_kernels]
        )
        return Needs(record.plan_bytes, record.workspace_bytes, kernels)

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

    def on_openmp(self, gomp_parallel: int) -> dict[str, int]:
        """Fields of flashxla_context for the threads of an OpenMP runtime; only of the cpu library.

        gomp_parallel: the address of the runtime's function of this name.
        """
        loop = ctypes.cast(self._cdll.flashxla_openmp_parallel_for, ctypes.c_void_p).value
        assert loop is not None
        return {"parallel_for": loop, "pool": gomp_parallel}

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


def _words(record: ctypes.Structure) -> Any:
    """A struct as 64-bit words; setting one is many times as fast as setting a field."""
    return memoryview(record).cast("B").cast("Q")


def _word(offset: int) -> int:
    assert offset % 8 == 0, offset
    return offset // 8


def version_text(number: int) -> str:
    """1 * 1000 + 2 -> "1.2"."""
    return f"{number // 1000}.{number % 1000}"


def _folders(name: str) -> Iterable[tuple[Path, str]]:
    """Where the file of a library may be, and the package that puts it there. The first folder that has it counts."""
    if folder := os.environ.get("FLASHXLA_LIBRARY_DIR"):
        yield Path(folder), _SELF
        return
    yield Path(__file__).parent / "lib", _SELF
    # An editable install keeps the Python files in the checkout and the libraries in site-packages.
    yield Path(sysconfig.get_path("purelib")) / "flashxla" / "lib", _SELF
    for package in PLATFORMS[name].packages if name in PLATFORMS else ():
        if spec := importlib.util.find_spec(package.replace("-", "_")):
            for place in spec.submodule_search_locations or ():
                yield Path(place) / "lib", package


def _find(name: str) -> tuple[Path, str] | None:
    """The file of a library and its package, None if it is not installed."""
    for folder, package in _folders(name):
        if (path := folder / f"libflashxla_{name}.so").exists():
            return path, package
    return None


def is_checking() -> bool:
    """Whether FLASHXLA_CHECK=1, for programs that are made now."""
    return os.environ.get("FLASHXLA_CHECK") == "1"


@functools.cache
def is_installed(platform: str) -> bool:
    """Whether the library of a platform is there."""
    return _find(platform) is not None


def library_path(name: str) -> Path:
    """The file of a library: of a platform, or "pjrt".

    Raises ImportError if it is not installed, or if its package is of another version than flashxla.
    """
    found = _find(name)
    if found is None:
        places = ", ".join(str(folder) for folder, _ in _folders(name))
        how_to_build = PLATFORMS.get(name, CPU).how_to_build
        raise ImportError(f"flashxla: libflashxla_{name}.so not found in {places}; {how_to_build}")
    path, package = found
    ours, its = install.version(_SELF), install.version(package)
    if ours != its:
        raise ImportError(f"flashxla: {package} {its} does not fit flashxla {ours}: install {package} {ours}")
    return path


@functools.cache
def library(platform: str) -> Library:
    """The library of a platform, by its name. Raises ImportError if it is not installed."""
    return Library(platform, library_path(platform))
