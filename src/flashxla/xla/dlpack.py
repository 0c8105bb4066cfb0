"""DLPack in and out of PyTorch/XLA without a copy.

torch_xla's own exchange is for CPUs. On a GPU the memory of another framework's tensor gets into PyTorch/XLA as the
result of a transfer of host memory that never happens: the plugin adapter makes a view of it instead
(csrc/pjrt/device_views.cc).
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from flashxla.xla import gpu, pjrt_adapter, registration

_CPU, _CUDA = 1, 2  # DLDeviceType
_LEGACY_STREAM = 1
# DLDataType's (code, bits)
_DTYPES = {
    (0, 8): torch.int8,
    (0, 16): torch.int16,
    (0, 32): torch.int32,
    (0, 64): torch.int64,
    (1, 8): torch.uint8,
    (2, 16): torch.float16,
    (2, 32): torch.float32,
    (2, 64): torch.float64,
    (4, 16): torch.bfloat16,
    (6, 8): torch.bool,
    (10, 8): torch.float8_e4m3fn,
    (12, 8): torch.float8_e5m2,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


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
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    )


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_rename_capsule = ctypes.pythonapi.PyCapsule_SetName
_rename_capsule.restype, _rename_capsule.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_NEW, _USED = b"dltensor", b"used_dltensor"


def from_dlpack(external: Any) -> torch.Tensor:
    """An XLA tensor that is the memory of another framework's tensor. See flashxla.torch.from_dlpack."""
    wanted = {"cpu": _CPU, "cuda": _CUDA}[registration.torch_xla_platform()]
    if not hasattr(external, "__dlpack__"):
        raise TypeError(
            f"from_dlpack: external: got {type(external).__name__}; accepted: objects with __dlpack__"
        )
    device_type, device_id = external.__dlpack_device__()
    if device_type != wanted:
        raise ValueError(
            f"from_dlpack: external: got a tensor on DLPack device ({int(device_type)}, {device_id}); accepted: device "
            f"type {wanted}, since PyTorch/XLA runs on {os.environ['PJRT_DEVICE']}"
        )
    if wanted == _CPU:
        from torch_xla.utils import dlpack

        return dlpack.from_dlpack(external)
    capsule = external.__dlpack__(stream=_LEGACY_STREAM)
    address = _capsule_pointer(capsule, _NEW)
    managed = _ManagedTensor.from_address(address)
    shape = tuple(managed.shape[: managed.ndim])
    dtype = _DTYPES.get((managed.dtype_code, managed.dtype_bits))
    if dtype is None or managed.dtype_lanes != 1:
        code = (managed.dtype_code, managed.dtype_bits, managed.dtype_lanes)
        raise TypeError(f"from_dlpack: external: got DLPack type {code}; accepted: {_names(_CODES)}")
    strides = tuple(managed.strides[: managed.ndim]) if managed.strides else None
    if strides is not None and not _is_dense(shape, strides):
        raise ValueError(
            f"from_dlpack: external: got shape {shape} with strides {strides}; accepted: dense row-major tensors"
        )
    # What wrote the memory is on a stream that XLA does not know.
    _wait_for_device(device_id)
    return _view(pjrt_adapter.load(), capsule, shape, dtype, device_id)


def _names(dtypes: Any) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


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


def _view(
    adapter: pjrt_adapter.Adapter, capsule: Any, shape: tuple[int, ...], dtype: torch.dtype, device_id: int
) -> torch.Tensor:
    import torch_xla

    own = gpu.devices_of_process(os.environ)
    ordinal = own.index(device_id) if own else device_id
    places: list[int] = []

    def provide(host_address: int) -> None:
        places.append(host_address)
        adapter.provide_view(host_address, _capsule_pointer(capsule, _NEW))

    try:
        tensors = torch_xla._XLAC._xla_tensors_from_aten(
            [_StandIn(shape, dtype, provide)], [f"xla:{ordinal}"]
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

    def __init__(self, tensor: torch.Tensor, address: int, device_id: int) -> None:
        import torch_xla

        self._tensor, self._address, self._device_id = tensor, address, device_id
        # A program that updates the tensor writes into its memory, which the tensor then owns, or into new memory;
        # the tensors of its graph own the old one.
        self._owners = (tensor, *torch_xla._XLAC._get_tensors_xla_device_data_node([tensor])[1])

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, self._device_id

    def __dlpack__(self, **_: Any) -> Any:
        # The data is there: to_dlpack has waited for it, so no stream need be told.
        shape = self._tensor.shape
        code, bits = _CODES[self._tensor.dtype]
        managed = _ManagedTensor(
            data=self._address,
            device_type=_CUDA,
            device_id=self._device_id,
            ndim=len(shape),
            dtype_code=code,
            dtype_bits=bits,
            dtype_lanes=1,
            shape=(ctypes.c_int64 * len(shape))(*shape),
            deleter=_RELEASE,
        )
        address = ctypes.addressof(managed)
        _exported[address] = (managed, self._owners)
        return _new_capsule(address, _NEW, None)


# What consumers hold, by the address of its DLManagedTensor. A capsule that nobody consumes stays.
_exported: dict[int, tuple[_ManagedTensor, tuple[Any, ...]]] = {}


def _release(address: int) -> None:
    _exported.pop(address, None)


_RELEASE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_release)


def to_dlpack(tensor: torch.Tensor) -> Any:
    """An object whose __dlpack__ gives an XLA tensor's memory. See flashxla.torch.to_dlpack."""
    import torch_xla

    if tensor.device.type != "xla":
        raise ValueError(f"to_dlpack: tensor: got a tensor on {tensor.device}; accepted: XLA tensors")
    if registration.torch_xla_platform() == "cpu":
        return _Capsule(tensor)
    if tensor.dtype not in _CODES:
        raise TypeError(f"to_dlpack: tensor: got {tensor.dtype}; accepted: {_names(_CODES)}")
    torch_xla._XLAC._xla_sync_multi([tensor], [], wait=True, sync_xla_data=True)
    torch_xla._XLAC._xla_wait_device_ops([])
    own = gpu.devices_of_process(os.environ)
    device_id = own[tensor.device.index] if own else tensor.device.index
    return _Export(tensor, torch_xla._XLAC._unsafe_buffer_pointer(tensor), device_id)


class _Capsule:
    """torch_xla's own export of a CPU tensor, which is a bare capsule, as an object with the protocol's methods."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU, 0

    def __dlpack__(self, **_: Any) -> Any:
        from torch_xla.utils import dlpack

        return dlpack.to_dlpack(self._tensor)
