"""DLPack in and out of PyTorch/XLA without a copy.

What comes in is checked here for both platforms. On the CPU torch_xla's own exchange then takes it. On a GPU the memory
of another framework's tensor gets into PyTorch/XLA as the result of a transfer of host memory that never happens: the
plugin adapter makes a view of it instead (csrc/pjrt/device_views.cc).
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from flashxla import native
from flashxla.xla import gpu, pjrt_adapter, registration

_CPU, _CUDA = 1, 2  # DLDeviceType
# PyTorch's type, XLA's name, and DLDataType's code and bits
_TYPES = (
    (torch.int8, "s8", 0, 8),
    (torch.int16, "s16", 0, 16),
    (torch.int32, "s32", 0, 32),
    (torch.int64, "s64", 0, 64),
    (torch.uint8, "u8", 1, 8),
    (torch.uint16, "u16", 1, 16),
    (torch.uint32, "u32", 1, 32),
    (torch.uint64, "u64", 1, 64),
    (torch.float16, "f16", 2, 16),
    (torch.float32, "f32", 2, 32),
    (torch.float64, "f64", 2, 64),
    (torch.bfloat16, "bf16", 4, 16),
    (torch.complex64, "c64", 5, 64),
    (torch.complex128, "c128", 5, 128),
    (torch.bool, "pred", 6, 8),
    (torch.float8_e4m3fn, "f8e4m3fn", 10, 8),
    (torch.float8_e5m2, "f8e5m2", 12, 8),
)
_OF_XLA = {name: (code, bits) for _, name, code, bits in _TYPES}
_OF_DLPACK = {(code, bits): dtype for dtype, _, code, bits in _TYPES}
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class _Platform(NamedTuple):
    """What an XLA platform takes."""

    device_type: int
    alignment: int  # of the memory of a program's arguments, in bytes
    dtypes: dict[tuple[int, int], torch.dtype]  # by DLDataType's code and bits


_PLATFORMS = {
    # torch_xla's exchange knows no float8.
    "cpu": _Platform(_CPU, 64, {key: dtype for key, dtype in _OF_DLPACK.items() if dtype not in _FLOAT8}),
    "cuda": _Platform(_CUDA, 16, _OF_DLPACK),
}


class _ManagedTensor(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_is_capsule = ctypes.pythonapi.PyCapsule_IsValid
_is_capsule.restype, _is_capsule.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_rename_capsule = ctypes.pythonapi.PyCapsule_SetName
_rename_capsule.restype, _rename_capsule.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
_NEW, _USED = b"dltensor", b"used_dltensor"


class _Incoming(NamedTuple):
    """A tensor in a capsule that PyTorch/XLA can take as it is."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_id: int


def from_dlpack(external: Any) -> torch.Tensor:
    """An XLA tensor that is the memory of another framework's tensor. See flashxla.torch.from_dlpack."""
    import torch_xla.runtime

    platform = registration.torch_xla_platform()
    if torch_xla.runtime.is_spmd():
        # A tensor then has a part on each device, and torch_xla reads memory that is not there.
        raise RuntimeError("from_dlpack: got a process in SPMD mode; accepted: one without use_spmd()")
    if not hasattr(external, "__dlpack__"):
        raise _refusal(type(external).__name__, "objects with __dlpack__", TypeError)
    # No stream, which not all producers take: on a GPU the wait below is for all of them.
    capsule = external.__dlpack__()
    incoming = _read(capsule, _PLATFORMS[platform])
    if platform == "cpu":
        return torch_xla._XLAC._from_dlpack(capsule)
    ordinal = _ordinal(incoming.device_id)
    # What wrote the memory is on a stream that XLA does not know.
    _wait_for_device(incoming.device_id)
    return _view(pjrt_adapter.load(), capsule, incoming, ordinal)


def _read(capsule: Any, platform: _Platform) -> _Incoming:
    """What is in a capsule. Raises TypeError and ValueError for what the platform can't take without a copy."""
    if not _is_capsule(capsule, _NEW):
        raise _refusal(f"{capsule!r} from its __dlpack__", "a capsule with the name dltensor", TypeError)
    managed = _ManagedTensor.from_address(_capsule_pointer(capsule, _NEW))
    if managed.device_type != platform.device_type:
        device = (managed.device_type, managed.device_id)
        raise _refusal(
            f"a tensor on DLPack device {device}",
            f"device type {platform.device_type}, since PyTorch/XLA runs on {os.environ['PJRT_DEVICE']}",
        )
    code = (managed.dtype_code, managed.dtype_bits, managed.dtype_lanes)
    dtype = platform.dtypes.get(code[:2])
    if dtype is None or managed.dtype_lanes != 1:
        raise _refusal(f"DLPack type {code}", _names(platform.dtypes.values()), TypeError)
    shape = tuple(managed.shape[: managed.ndim])
    if any(size < 0 for size in shape):
        raise _refusal(f"shape {shape}", "sizes of at least 0")
    strides = tuple(managed.strides[: managed.ndim]) if managed.strides else _dense_strides(shape)
    if not _is_dense(shape, strides):
        raise _refusal(f"shape {shape} with strides {strides}", "dense row-major tensors")
    address = (managed.data or 0) + managed.byte_offset
    if address % platform.alignment:
        raise _refusal(
            f"memory at {address:#x}",
            f"addresses that are multiples of {platform.alignment}, which XLA needs",
        )
    return _Incoming(shape, dtype, managed.device_id)


def _refusal(got: str, accepted: str, kind: type[Exception] = ValueError) -> Exception:
    return kind(f"from_dlpack: external: got {got}; accepted: {accepted}")


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements are in row-major order without gaps. The stride of a dimension of size 1 says nothing."""
    dense = zip(shape, strides, _dense_strides(shape), strict=True)
    return 0 in shape or all(size == 1 or stride == wanted for size, stride, wanted in dense)


def _ordinal(device_id: int) -> int:
    """The number that a GPU has among this process's XLA devices."""
    own = gpu.devices_of_process(os.environ)
    if own is None:
        return device_id
    if device_id not in own:
        raise _refusal(f"a tensor on GPU {device_id}", f"this process's GPUs: {', '.join(map(str, own))}")
    return own.index(device_id)


class _StandIn(torch.Tensor):
    """A CPU tensor of which nothing but the copy that torch_xla makes exists. `made` is told where that is."""

    made: Callable[[int], None]

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, made: Callable[[int], None]) -> _StandIn:
        cpu = torch.device("cpu")
        tensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=cpu)
        tensor.made = made
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.ops.aten._to_copy.default:
            return NotImplemented
        # Never touched, so that large ones take no memory.
        copy = torch.empty(args[0].shape, dtype=args[0].dtype)
        args[0].made(copy.data_ptr())
        return copy


def _view(adapter: pjrt_adapter.Adapter, capsule: Any, incoming: _Incoming, ordinal: int) -> torch.Tensor:
    import torch_xla

    places: list[int] = []

    def provide(host_address: int) -> None:
        places.append(host_address)
        adapter.provide_view(host_address, _capsule_pointer(capsule, _NEW))

    try:
        tensors = torch_xla._XLAC._xla_tensors_from_aten(
            [_StandIn(incoming.shape, incoming.dtype, provide)], [f"xla:{ordinal}"]
        )
    finally:
        taken = bool(places) and not any([adapter.withdraw_view(place) for place in places])
        if taken:
            # The buffer deletes the tensor, also one that could not be made; the capsule must not do so again.
            _rename_capsule(capsule, _USED)
    if not taken:
        raise RuntimeError("from_dlpack: PyTorch/XLA did not take the tensor's memory")
    return tensors[0]


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _wait_for_device(device_id: int) -> None:
    """Until all work on a GPU is done, whichever framework started it."""
    context = ctypes.c_void_p()
    driver = _driver()
    steps: tuple[Callable[[], int], ...] = (
        lambda: driver.cuInit(0),
        lambda: driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device_id),
        lambda: driver.cuCtxPushCurrent_v2(context),
        lambda: driver.cuCtxSynchronize(),
        lambda: driver.cuCtxPopCurrent_v2(ctypes.byref(context)),
        lambda: driver.cuDevicePrimaryCtxRelease_v2(device_id),
    )
    for step in steps:
        if error := step():
            raise RuntimeError(f"from_dlpack: waiting for GPU {device_id}: CUDA error {error}")


class _Export:
    """An XLA tensor's memory, for other frameworks' from_dlpack."""

    def __init__(
        self,
        address: int,
        shape: Sequence[int],
        dtype: tuple[int, int],
        device: tuple[int, int],
        owners: Sequence[torch.Tensor],
    ) -> None:
        self._address, self._shape, self._dtype, self._device = address, tuple(shape), dtype, device
        self._owners = owners

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        # The data is there: to_dlpack has waited for it, so no stream need be told.
        if copy:
            raise BufferError(f"to_dlpack: copy: got {copy}; accepted: False or None")
        if dl_device is not None and tuple(dl_device) != self._device:
            raise BufferError(f"to_dlpack: dl_device: got {tuple(dl_device)}; accepted: {self._device}")
        sizes = ctypes.c_int64 * len(self._shape)
        managed = _ManagedTensor(
            self._address,
            *self._device,
            len(self._shape),
            *self._dtype,
            1,
            sizes(*self._shape),
            sizes(*_dense_strides(self._shape)),
        )
        managed.owners = self._owners
        return _new_capsule()(ctypes.addressof(managed), managed)


@functools.cache
def _new_capsule() -> Callable[[int, _ManagedTensor], Any]:
    """Makes a capsule that owns a _ManagedTensor (csrc/pjrt/exported_tensors.cc)."""
    function = ctypes.PyDLL(str(native.library_path("pjrt"))).flashxla_pjrt_new_capsule
    function.restype, function.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.py_object)
    return function


def to_dlpack(tensor: torch.Tensor) -> Any:
    """An object whose __dlpack__ gives an XLA tensor's memory. See flashxla.torch.to_dlpack."""
    import torch_xla

    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"to_dlpack: tensor: got {type(tensor).__name__}; accepted: XLA tensors")
    if tensor.device.type != "xla":
        raise ValueError(f"to_dlpack: tensor: got a tensor on {tensor.device}; accepted: XLA tensors")
    # All that is pending: computed alone, an update of this tensor would take the memory that another's starts from.
    torch_xla._XLAC._xla_sync_live_tensors(str(tensor.device), [], True)
    torch_xla._XLAC._xla_wait_device_ops([])
    try:
        address = torch_xla._XLAC._unsafe_buffer_pointer(tensor)
    except RuntimeError as error:
        raise ValueError(
            "to_dlpack: tensor: got a tensor that has no buffer on one device; accepted: tensors that are neither "
            "donated nor sharded"
        ) from error
    # Not the tensor's dtype: XLA_USE_32BIT_LONG makes XLA's another one.
    dtype = torch_xla._XLAC._get_xla_tensor_shape_type(tensor)
    if dtype not in _OF_XLA:
        raise TypeError(f"to_dlpack: tensor: got XLA's type {dtype}; accepted: {', '.join(_OF_XLA)}")
    # A program that updates the tensor writes into its memory, which the tensor then owns, or into new memory;
    # the tensors of its graph own the old one.
    owners = (tensor, *torch_xla._XLAC._get_tensors_xla_device_data_node([tensor])[1])
    return _Export(address, tensor.shape, _OF_XLA[dtype], _device_of(tensor), owners)


def _device_of(tensor: torch.Tensor) -> tuple[int, int]:
    """DLPack's device of an XLA tensor."""
    if registration.torch_xla_platform() == "cpu":
        return _CPU, 0
    own = gpu.devices_of_process(os.environ)
    return _CUDA, own[tensor.device.index] if own else tensor.device.index
