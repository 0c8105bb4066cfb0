"""XLA tensors that share memory with other frameworks' tensors: what comes in, what goes out, what is refused.

PyTorch/XLA runs on the CPU here; tests/cuda/test_torch_xla_gpu.py does the same on a GPU. What a GPU takes is checked
by the same function, so that it is tested with capsules that say that they are of one.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")
torch_xla = pytest.importorskip("torch_xla")
jax = pytest.importorskip("jax")

import flashxla.torch as fx  # noqa: E402
from flashxla.xla import dlpack, registration  # noqa: E402
from tests.pjrt.caller import DELETER, ManagedTensor, take  # noqa: E402

ROOT = Path(__file__).parents[2]
BOTH_WAYS = (
    "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 bfloat16 complex64 bool"
)
ALIGNMENT = {"cpu": 64, "cuda": 16}


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    if registration.torch_xla_platform() != "cpu":
        pytest.skip("PyTorch/XLA runs on a GPU")


def pointer(tensor: Any) -> int:
    torch_xla.sync(wait=True)
    return torch_xla._XLAC._unsafe_buffer_pointer(tensor)


def on_xla(tensor: Any) -> Any:
    return tensor.to(torch_xla.device())


# In


@pytest.mark.parametrize("shape", [(), (1,), (3, 5, 7), (0, 4)], ids=str)
@pytest.mark.parametrize("dtype", BOTH_WAYS.split())
def test_tensors_of_torch_come_in(dtype: str, shape: tuple[int, ...]) -> None:
    theirs = torch.randint(0, 2, shape).to(getattr(torch, dtype))
    ours = fx.from_dlpack(theirs)
    assert (ours.device.type, ours.dtype, ours.shape) == ("xla", theirs.dtype, theirs.shape)
    assert pointer(ours) == theirs.data_ptr()
    assert torch.equal(ours.cpu(), theirs)


def test_arrays_of_jax_come_in() -> None:
    theirs = jax.numpy.arange(12.0).reshape(3, 4)
    ours = fx.from_dlpack(theirs)
    assert pointer(ours) == theirs.unsafe_buffer_pointer()
    assert ours.tolist() == theirs.tolist()


def test_memory_that_comes_in_stays_while_it_is_needed() -> None:
    class Array(np.ndarray):
        """One that can be watched."""

    theirs = torch.ones(8).numpy().view(Array)  # as aligned as PyTorch's memory
    alive = weakref.ref(theirs)
    ours = fx.from_dlpack(theirs)
    del theirs
    assert alive() is not None
    assert ours.sum().item() == 8
    del ours
    torch_xla.sync(wait=True)
    assert alive() is None


X = torch.arange(12.0).view(3, 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (X.t, r"shape \(4, 3\) with strides \(1, 4\); accepted: dense row-major"),
        (lambda: torch.zeros(2, 3, 4).transpose(0, 1), r"strides \(4, 12, 1\); accepted: dense"),
        (lambda: X[:, :2], r"shape \(3, 2\) with strides \(4, 1\); accepted: dense"),
        (lambda: X[::2], r"strides \(8, 1\); accepted: dense"),
        (lambda: torch.ones(1).expand(4), r"strides \(0,\); accepted: dense"),
        (lambda: X.numpy()[:, ::-1], r"strides \(4, -1\); accepted: dense"),
        (lambda: X.view(-1)[1:], "accepted: addresses that are multiples of 64"),
        (lambda: X[1:], "accepted: addresses that are multiples of 64"),
        (lambda: jax.numpy.ones(3, "float8_e5m2"), r"DLPack type \(12, 8, 1\); accepted: int8, .*, bool$"),
    ],
    ids=["t", "transpose", "columns", "every 2nd", "expand", "reverse", "offset 4", "offset 16", "float8"],
)
def test_what_needs_a_copy_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^from_dlpack: external: got .*{message}"):
        fx.from_dlpack(make())


class Versioned:
    """Offers what nobody asked for."""

    def __dlpack__(self) -> Any:
        return torch.ones(3).__dlpack__(max_version=(1, 0))


@pytest.mark.parametrize(
    ("external", "got", "accepted"),
    [
        (None, "NoneType", "objects with __dlpack__"),
        ([1.0, 2.0], "list", "objects with __dlpack__"),
        (torch.utils.dlpack.to_dlpack(torch.ones(3)), "PyCapsule", "objects with __dlpack__"),
        (Versioned(), '<capsule object "dltensor_versioned".*', "a capsule with the name dltensor"),
    ],
    ids=["None", "list", "capsule", "versioned"],
)
def test_what_is_no_tensor_is_refused(external: Any, got: str, accepted: str) -> None:
    with pytest.raises(TypeError, match=rf"^from_dlpack: external: got {got}; accepted: {accepted}$"):
        fx.from_dlpack(external)


# Capsules of any content, on both platforms


class Producer:
    """A framework whose __dlpack__ takes no arguments. Its memory is float32 [2, 3] but for what fields say."""

    def __init__(
        self, platform: str, shape: tuple[int, ...] = (2, 3), strides: tuple[int, ...] = (), **fields: int
    ) -> None:
        self.deleted = 0
        self._deleter = DELETER(self._delete)
        self._sizes = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = (ctypes.c_int64 * len(strides))(*strides)
        self._memory = torch.arange(100.0)
        self.address = self._memory.data_ptr()
        values: dict[str, Any] = {
            "data": self.address,
            "device_type": {"cpu": 1, "cuda": 2}[platform],
            "ndim": len(shape),
            "dtype_code": 2,
            "dtype_bits": 32,
            "dtype_lanes": 1,
            "shape": ctypes.addressof(self._sizes),
            "strides": ctypes.addressof(self._strides) if strides else None,
            "deleter": ctypes.cast(self._deleter, ctypes.c_void_p).value,
        }
        self._tensor = ManagedTensor(**{**values, **fields})
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        self.capsule = new(ctypes.addressof(self._tensor), b"dltensor", None)

    def _delete(self, _: int) -> None:
        self.deleted += 1

    def __dlpack__(self) -> Any:
        return self.capsule


class Taken(NamedTuple):
    """What the stand-in for the view on a GPU was given."""

    incoming: Any
    ordinal: int


@pytest.fixture(params=["cpu", "cuda"])
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where PyTorch/XLA runs; for a GPU up to the view of its memory."""
    if request.param == "cuda":
        monkeypatch.setenv("PJRT_DEVICE", "CUDA")
        monkeypatch.setattr(registration, "torch_xla_platform", lambda: "cuda")
        monkeypatch.setattr(dlpack, "_wait_for_device", lambda device_id: None)
        monkeypatch.setattr(dlpack.pjrt_adapter, "load", lambda: None)
        monkeypatch.setattr(dlpack, "_view", lambda adapter, capsule, *rest: Taken(*rest))
    return request.param


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((2, 3), ()),
        ((2, 3), (3, 1)),
        ((), ()),
        ((1, 2, 1, 3), (99, 3, 77, 1)),  # nobody takes a step in a dimension of size 1
        ((3, 0, 5), (5, 5, 1)),  # as NumPy has them
        ((4, 0), (1, 4)),
    ],
    ids=str,
)
def test_dense_capsules_are_taken(platform: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    result = fx.from_dlpack(Producer(platform, shape, strides))
    if platform == "cuda":
        assert result == ((shape, torch.float32, 0), 0)
    else:
        assert torch.equal(result.cpu(), torch.arange(100.0)[: result.numel()].view(shape))


def test_an_offset_in_bytes_counts(platform: str) -> None:
    result = fx.from_dlpack(Producer(platform, byte_offset=ALIGNMENT[platform]))
    if platform == "cpu":
        assert result[0, 0].item() == ALIGNMENT["cpu"] / 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"device_type": 3},
            r"a tensor on DLPack device \(3, 0\); accepted: device type [12], since .* runs on C",
        ),
        ({"dtype_lanes": 4}, r"DLPack type \(2, 32, 4\); accepted: int8, int16"),
        ({"dtype_code": 3}, r"DLPack type \(3, 32, 1\); accepted: int8, int16"),
        ({"dtype_bits": 4}, r"DLPack type \(2, 4, 1\); accepted: int8, int16"),
        ({"shape": (2, -3)}, r"shape \(2, -3\); accepted: sizes of at least 0"),
        ({"strides": (1, 2)}, r"shape \(2, 3\) with strides \(1, 2\); accepted: dense row-major"),
        ({"strides": (4, 1)}, r"shape \(2, 3\) with strides \(4, 1\); accepted: dense row-major"),
        ({"strides": (0, 1)}, r"shape \(2, 3\) with strides \(0, 1\); accepted: dense row-major"),
        ({"byte_offset": 4}, "memory at 0x.*; accepted: addresses that are multiples of {alignment}, "),
        ({"byte_offset": 8}, "memory at 0x.*; accepted: addresses that are multiples of {alignment}, "),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_other_capsules_are_refused_and_stay_the_producers(
    platform: str, fields: dict[str, Any], message: str
) -> None:
    producer = Producer(platform, **fields)
    message = message.replace("{alignment}", str(ALIGNMENT[platform]))
    with pytest.raises((TypeError, ValueError), match=f"^from_dlpack: external: got {message}"):
        fx.from_dlpack(producer)
    assert "dltensor" in repr(producer.capsule) and "used" not in repr(producer.capsule)
    assert producer.deleted == 0


def test_a_capsule_that_is_taken_is_deleted_once() -> None:
    producer = Producer("cpu")
    tensor = fx.from_dlpack(producer)
    assert "used_dltensor" in repr(producer.capsule)
    assert producer.deleted == 0
    del tensor
    torch_xla.sync(wait=True)
    assert producer.deleted == 1


@pytest.mark.parametrize("platform", ["cuda"], indirect=True)
@pytest.mark.parametrize(
    ("variables", "device_id", "ordinal"),
    [
        ({}, 1, 1),
        ({"JAX_CUDA_VISIBLE_DEVICES": "3,1"}, 1, 1),
        ({"JAX_CUDA_VISIBLE_DEVICES": "3,1"}, 3, 0),
        ({"JAX_CUDA_VISIBLE_DEVICES": "3,1"}, 0, "a tensor on GPU 0; accepted: this process's GPUs: 3, 1"),
        ({"PJRT_LOCAL_PROCESS_RANK": "1", "PJRT_LOCAL_PROCESS_COUNT": "2"}, 1, 0),
        (
            {"PJRT_LOCAL_PROCESS_RANK": "1", "PJRT_LOCAL_PROCESS_COUNT": "2"},
            0,
            "a tensor on GPU 0; accepted: .* 1",
        ),
    ],
)
def test_a_gpu_of_the_process(
    platform: str,
    variables: dict[str, str],
    device_id: int,
    ordinal: int | str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("JAX_CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    producer = Producer(platform, device_id=device_id)
    if isinstance(ordinal, int):
        assert fx.from_dlpack(producer).ordinal == ordinal
    else:
        with pytest.raises(ValueError, match=f"^from_dlpack: external: got {ordinal}$"):
            fx.from_dlpack(producer)


# Out


class Consumer(NamedTuple):
    """A framework that takes memory, and how it says where that is."""

    take: Callable[[Any], Any]
    address: Callable[[Any], int]


CONSUMERS = {
    "torch": Consumer(torch.from_dlpack, lambda tensor: tensor.data_ptr()),
    "numpy": Consumer(np.from_dlpack, lambda array: array.ctypes.data),
    "jax": Consumer(jax.dlpack.from_dlpack, lambda array: array.unsafe_buffer_pointer()),
}


@pytest.mark.parametrize("consumer", CONSUMERS)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5, 7), (0, 4)], ids=str)
def test_tensors_go_out(consumer: str, shape: tuple[int, ...]) -> None:
    ours = on_xla(torch.randn(shape))
    theirs = CONSUMERS[consumer].take(fx.to_dlpack(ours))
    assert tuple(theirs.shape) == shape
    if ours.numel():
        assert CONSUMERS[consumer].address(theirs) == pointer(ours)
    assert theirs.tolist() == ours.tolist()


def test_strides_go_out() -> None:
    """As DLPack asks for since its version 1.2, even of dense tensors."""
    memory = torch.zeros(24)
    exported = dlpack._Export(memory.data_ptr(), (2, 3, 4), (2, 32), (1, 0), (memory,))
    tensor = take(exported.__dlpack__())
    assert list((ctypes.c_int64 * 3).from_address(tensor.strides)) == [12, 4, 1]
    DELETER(tensor.deleter)(ctypes.addressof(tensor))


@pytest.mark.parametrize("dtype", [*BOTH_WAYS.split(), "float8_e4m3fn", "float8_e5m2"])
def test_types_go_out(dtype: str) -> None:
    """To PyTorch, and those that it does not take to JAX."""
    values = torch.tensor([0, 1, 1, 0]).to(getattr(torch, dtype))
    exported = fx.to_dlpack(on_xla(values))
    if "float8" in dtype:
        theirs = jax.dlpack.from_dlpack(exported)
        assert str(theirs.dtype) == dtype
        assert theirs.astype("float32").tolist() == [0, 1, 1, 0]
    else:
        theirs = torch.from_dlpack(exported)
        assert theirs.dtype == values.dtype
        assert torch.equal(theirs, values)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1,
        lambda x: x[1:],
        lambda x: x.t(),
        lambda x: (x * 2)[:, 1],
        lambda x: x.view(-1),
        lambda x: x.expand(2, 3, 4),
        lambda x: x.unsqueeze(0),
        lambda x: x.add_(1),
        lambda x: x[1].zero_(),
    ],
    ids=["sum", "slice", "t", "column", "flat", "expand", "unsqueeze", "in place", "in place in a view"],
)
def test_what_is_not_computed_yet_goes_out(compute: Callable[[Any], Any]) -> None:
    """In this process, which test_a_process_with_exports has shown to survive it."""
    theirs = torch.from_dlpack(fx.to_dlpack(compute(on_xla(X.clone()))))
    assert torch.equal(theirs, compute(X.clone()))


@pytest.mark.parametrize("launch", [lambda: None, torch_xla.sync], ids=["pending", "launched"])
def test_the_result_is_waited_for(launch: Callable[[], None]) -> None:
    factor = result = on_xla(torch.full((1000, 1000), 1e-3))
    for _ in range(8):
        result = result @ factor
    launch()
    theirs = np.from_dlpack(fx.to_dlpack(result))
    at_once = theirs.copy()
    assert at_once.all()
    assert np.array_equal(at_once, result.cpu().numpy())


def test_a_pending_update_of_two_tensors_goes_out() -> None:
    """One call updates both: it must not find the memory gone that it starts from when the second goes out."""
    key_cache, value_cache = (on_xla(torch.zeros(4, 8, 2, 32)) for _ in range(2))
    new, slots = on_xla(torch.ones(3, 2, 32)), on_xla(torch.tensor([0, 5, 9]))
    fx.reshape_and_cache_flash(new, new * 2, key_cache, value_cache, slots)
    keys = torch.from_dlpack(fx.to_dlpack(key_cache))
    values = torch.from_dlpack(fx.to_dlpack(value_cache))
    assert (keys.sum().item(), values.sum().item()) == (192, 384)


@pytest.mark.parametrize("backend", [None, "openxla"], ids=["lazy", "openxla"])
def test_updates_in_place_are_seen(backend: str | None) -> None:
    caches = [on_xla(torch.zeros(4, 8, 2, 32)) for _ in range(2)]
    before = [pointer(cache) for cache in caches]
    theirs = [torch.from_dlpack(fx.to_dlpack(cache)) for cache in caches]
    update = fx.reshape_and_cache_flash
    if backend:
        torch._dynamo.reset()
        update = torch.compile(lambda *args: fx.reshape_and_cache_flash(*args), backend=backend)
    for value in (1.0, 2.0):
        new = on_xla(torch.full((3, 2, 32), value))
        update(new, new, *caches, on_xla(torch.tensor([0, 5, 9])))
        torch_xla.sync(wait=True)
        assert [pointer(cache) for cache in caches] == before
        assert [seen.sum().item() for seen in theirs] == [3 * 2 * 32 * value] * 2


def test_an_update_of_memory_that_came_in_takes_new_memory() -> None:
    """XLA:CPU writes into no memory but its own. On a GPU the other framework sees the update."""
    theirs = [torch.zeros(4, 8, 2, 32) for _ in range(2)]
    caches = [fx.from_dlpack(tensor) for tensor in theirs]
    new = on_xla(torch.ones(3, 2, 32))
    fx.reshape_and_cache_flash(new, new, *caches, on_xla(torch.tensor([0, 5, 9])))
    assert [cache.sum().item() for cache in caches] == [192, 192]
    assert [tensor.sum().item() for tensor in theirs] == [0, 0]


def donated() -> Any:
    tensor = on_xla(torch.ones(3))
    torch_xla._XLAC._set_buffer_donation(tensor, True)
    result = tensor + 1
    torch_xla.sync(wait=True)
    assert result.sum().item() == 6
    return tensor


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: None, TypeError, "NoneType; accepted: XLA tensors"),
        (lambda: np.ones(3), TypeError, "ndarray; accepted: XLA tensors"),
        (lambda: torch.ones(3), ValueError, "a tensor on cpu; accepted: XLA tensors"),
        (lambda: torch.ones(3, device="meta"), ValueError, "a tensor on meta; accepted: XLA tensors"),
        (
            donated,
            ValueError,
            "a tensor that has no buffer on one device; accepted: .* neither donated nor sharded",
        ),
    ],
    ids=["None", "numpy", "cpu", "meta", "donated"],
)
def test_what_cannot_go_out(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^to_dlpack: tensor: got {message}"):
        fx.to_dlpack(make())


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"copy": True}, "copy: got True; accepted: False or None"),
        ({"dl_device": (2, 0)}, r"dl_device: got \(2, 0\); accepted: \(1, 0\)"),
    ],
)
def test_what_a_consumer_cannot_wish_for(wishes: dict[str, Any], message: str) -> None:
    exported = fx.to_dlpack(on_xla(torch.ones(3)))
    with pytest.raises(BufferError, match=f"^to_dlpack: {message}$"):
        exported.__dlpack__(**wishes)
    exported.__dlpack__(stream=None, max_version=(1, 0), dl_device=(1, 0), copy=False)


@pytest.mark.parametrize("consumer", [*CONSUMERS, "nobody"])
def test_memory_that_went_out_stays_while_it_is_needed(consumer: str) -> None:
    class Owner:
        """Stands for the XLA tensor."""

    memory, owner = torch.arange(4.0), Owner()
    alive = weakref.ref(owner)
    exported = dlpack._Export(memory.data_ptr(), (4,), (2, 32), (1, 0), (owner,))
    theirs = exported.__dlpack__() if consumer == "nobody" else CONSUMERS[consumer].take(exported)
    del exported, owner
    assert alive() is not None
    del theirs
    assert alive() is None


# What ended a process


# The consumer that outlives the interpreter: see tests/pjrt/test_exported_tensors.py.
PROCESS = """
import ctypes, os, torch, torch_xla
import numpy as np
import torch_xla.distributed.spmd as xs
import flashxla.torch as fx
from tests.pjrt.caller import take

if os.fork() == 0:  # to import all that once
    torch_xla.runtime.use_spmd()
    sharded = torch.ones(4, device=torch_xla.device())
    xs.mark_sharding(sharded, xs.Mesh(np.arange(2), (2,), ("x",)), ("x",))
    for exchange in (fx.to_dlpack, lambda _: fx.from_dlpack(torch.ones(3))):
        try:
            exchange(sharded)
        except Exception as error:
            print(error, flush=True)
    os._exit(0)
os.wait()

device = torch_xla.device()
print(torch.from_dlpack(fx.to_dlpack(torch.ones(3, device=device) + 1)).tolist(), flush=True)
print(torch.from_dlpack(fx.to_dlpack(torch.ones(3, device="xla:1") + 2)).tolist(), flush=True)
print(torch.from_dlpack(fx.to_dlpack(torch.arange(3, device=device))), flush=True)

text = torch.tensor([*b"the memory is there", 0], dtype=torch.uint8, device=device)
tensor = take(fx.to_dlpack(text).__dlpack__())
libc = ctypes.CDLL(None)
address, deleter, data = (ctypes.c_void_p(it) for it in (ctypes.addressof(tensor), tensor.deleter, tensor.data))
libc.__cxa_atexit(deleter, address, None)
libc.__cxa_atexit(libc.puts, data, None)
not_taken = fx.to_dlpack(text).__dlpack__()
"""


def test_a_process_with_exports() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROCESS],
        env={
            **os.environ,
            "CPU_NUM_DEVICES": "2",
            "XLA_USE_32BIT_LONG": "1",  # int64 tensors are then int32 in memory
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "deprecated" not in line]
    assert lines == [
        "to_dlpack: tensor: got a tensor that has no buffer on one device; accepted: tensors that are neither "
        "donated nor sharded",
        "from_dlpack: got a process in SPMD mode; accepted: one without use_spmd()",
        "[2.0, 2.0, 2.0]",
        "[3.0, 3.0, 3.0]",
        "tensor([0, 1, 2], dtype=torch.int32)",
        "the memory is there",
    ]
