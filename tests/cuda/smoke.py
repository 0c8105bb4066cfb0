"""Calls the CUDA library at random through its C ABI, to be run under compute-sanitizer. Needs numpy, no framework.

    compute-sanitizer --tool memcheck --padding 4096 python -m tests.cuda.smoke [SEED] [CALLS]

The calls are those of tests/native/driver.py, with sizes for which each engine of attention is met. Every tensor
is an allocation of its own, to the byte. Results are not held against a reference, tests/ops does that: each element
of a result must have been written, and nothing between its elements. With "--platform cpu" the same calls go to the
CPU library; with "--overrun" the library is told of a cache that is larger than its buffer, which must be caught.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import dataclasses
import math
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from flashxla import native
from tests.batches import tokens_with_copies
from tests.expanded import expanded, is_expanded, stored
from tests.native import driver
from tests.native.driver import FLOATS, FP8, Array, Call, Placed, Rng, Scalars, Sizes, pick

BF16, F16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
# Bits that no kernel computes, by dtype: a signalling NaN.
POISON = {BF16: 0x7FA5, F16: 0x7DA5, F32: 0x7FA5A5A5}
# Head sizes that the kernels have an instance for, and others; the latter are padded in shared memory.
INSTANCES, OTHERS = (64, 128, 192, 256), (1, 2, 7, 8, 40, 46, 72, 80, 96, 112, 136, 200, 255)


class CudaError(RuntimeError):
    """The driver reported an error, which may be one of an earlier kernel."""


class Gpu:
    """Memory and a stream of the first GPU, through the driver: the library's runtime shares its context."""

    def __init__(self) -> None:
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(str(error)) from None
        self._addresses: list[int] = []
        device, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(1))  # waits for no other stream
        self.context = {"stream": stream.value}

    def _call(self, name: str, *arguments: Any) -> None:
        status = self._driver[name](*arguments)
        if status:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
            raise CudaError(f"{name}: {(text.value or b'unknown error').decode()}")

    def allocate(self, size: int) -> int:
        """Memory of exactly this size; its contents are undefined."""
        if size == 0:
            return 0
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self._addresses.append(address.value)
        return address.value

    def write(self, address: int, data: Array) -> None:
        if data.nbytes:
            size = ctypes.c_size_t(data.nbytes)
            self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), ctypes.c_void_p(data.ctypes.data), size)

    def read(self, address: int, data: Array) -> None:
        if data.nbytes:
            size = ctypes.c_size_t(data.nbytes)
            self._call("cuMemcpyDtoH_v2", ctypes.c_void_p(data.ctypes.data), ctypes.c_uint64(address), size)

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    def free(self) -> None:
        for address in self._addresses:
            self._call("cuMemFree_v2", ctypes.c_uint64(address))
        self._addresses.clear()


class Host:
    """The same for the CPU library."""

    def __init__(self) -> None:
        self._buffers: list[Any] = []
        self.context = {"num_threads": 1}

    def allocate(self, size: int) -> int:
        if size == 0:
            return 0
        self._buffers.append(ctypes.create_string_buffer(size))
        return ctypes.addressof(self._buffers[-1])

    def write(self, address: int, data: Array) -> None:
        ctypes.memmove(address, data.ctypes.data, data.nbytes)

    def read(self, address: int, data: Array) -> None:
        ctypes.memmove(data.ctypes.data, address, data.nbytes)

    def synchronize(self) -> None:
        pass

    def free(self) -> None:
        self._buffers.clear()


Memory = Gpu | Host


@dataclasses.dataclass
class Buffer:
    """An array as it lies in memory: from its first element to its last, both included."""

    flat: Array  # the elements' bits, and what is between them
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    offset: int  # of the first element
    address: int = 0

    @classmethod
    def of(cls, array: Array, steps: tuple[int, int, int]) -> Buffer:
        """steps: (stride of the last axis, elements behind each of its rows, offset)."""
        step, behind, offset = steps
        strides = [step] * array.ndim
        held = stored(array).shape
        for axis in reversed(range(array.ndim - 1)):
            strides[axis] = strides[axis + 1] * max(held[axis + 1], 1)
            strides[axis] += behind if axis == array.ndim - 2 else 0
        strides = [0 if once else n for once, n in zip(is_expanded(array), strides, strict=True)]
        last = sum((n - 1) * stride for n, stride in zip(array.shape, strides, strict=True))
        elements = bits(array)
        # Where an index is read from the wrong place it is a small number.
        flat = np.full(offset + last + 1 if array.size else 0, POISON.get(array.dtype, 1), elements.dtype)
        result = cls(flat, array.dtype, array.shape, tuple(strides), offset)
        result.view()[...] = elements
        return result

    def view(self) -> Array:
        """The elements' bits."""
        if not self.flat.size:
            return np.empty(self.shape, self.flat.dtype)
        strides = tuple(stride * self.flat.itemsize for stride in self.strides)
        return np.lib.stride_tricks.as_strided(self.flat[self.offset :], self.shape, strides)

    def is_between(self) -> Array:
        """Which entries of `flat` are no element."""
        elements = dataclasses.replace(self, flat=np.zeros(self.flat.shape, bool))
        elements.view()[...] = True
        return ~elements.flat

    def place(self, memory: Memory) -> Placed:
        self.address = memory.allocate(self.flat.nbytes)
        memory.write(self.address, self.flat)
        first = self.address + self.offset * self.flat.itemsize if self.address else native.SOME_ADDRESS
        return Placed(native.Spec(self.dtype.name, self.shape, self.strides), first)


def steps(rng: Rng, array: Array, shift: bool) -> tuple[int, int, int]:
    """How far apart the elements lie: mostly as 16-byte loads and TMA need it, now and then not."""
    kind = rng.random()
    if kind < 0.5 and array.ndim > 1:
        return 1, 16 * int(rng.integers(0, 3)), 0
    if kind < 0.6 and array.ndim > 1:
        return 1, int(rng.integers(1, 4)), 0
    if kind < 0.7:
        return 2, 0, 0
    return 1, 0, int(shift and kind < 0.8)


def bits(array: Array) -> Array:
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


def poisoned(array: Array) -> Array:
    return np.full(array.shape, POISON[array.dtype], f"u{array.itemsize}").view(array.dtype)


def without_poison(array: Array) -> Array:
    """Random bytes may be what marks an element that was not written."""
    if array.dtype not in POISON:
        return array
    held = bits(stored(array))
    held = np.where(held == POISON[array.dtype], 0, held).astype(held.dtype)
    return np.broadcast_to(held.view(array.dtype), array.shape)


def check_written(operation: str, name: str, before: Buffer, memory: Memory, whole: bool) -> None:
    """Nothing between the elements was written; whole: and all elements were, so that none is poison any more."""
    after = dataclasses.replace(before, flat=np.empty_like(before.flat))
    memory.read(before.address, after.flat)
    if whole:
        left = np.argwhere(after.view() == POISON[before.dtype])
        if len(left):
            raise AssertionError(f"{operation}: {name}: {len(left)} not written, the first: {left[0]}")
    between = before.is_between()
    if not np.array_equal(after.flat[between], before.flat[between]):
        raise AssertionError(f"{operation}: {name}: written between its elements")


# --- sizes of attention ---------------------------------------------------------------------------------------------


def page_size(rng: Rng) -> int:
    """A multiple of 16, a multiple of 8, an odd one, or 0: dense."""
    return int(pick(rng, 16, 16, 32, 64, 128, 8, 24, 1, 7, 17, 0))


def element_of(rng: Rng, q_dtype: np.dtype) -> np.dtype:
    return pick(rng, *FP8) if q_dtype in FP8 else pick(rng, q_dtype, q_dtype, *FP8)


def lengths(rng: Rng, len_q: Array, most: int) -> Array:
    """Keys of each sequence: those of its queries and a past, or any number."""
    past = rng.integers(0, most, len(len_q))
    return len_q + past if rng.random() < 0.7 else past


def few_queries(rng: Rng) -> Sizes:
    """swap, split: at most 64 rows (queries of a head) per KV head; few long sequences, which blocks share, or many."""
    seqs, longest = pick(rng, (1, 3000), (2, 1500), (4, 400), (9, 150), (40, 30))
    kv_heads, group = int(rng.integers(1, 4)), int(rng.integers(1, 9))
    q_dtype = pick(rng, BF16, F16, BF16, F16, *FP8)
    len_q = rng.integers(0, 2 if rng.random() < 0.6 else 64 // group + 1, seqs)
    return Sizes(
        q_dtype=q_dtype,
        element=element_of(rng, q_dtype),
        kv_heads=kv_heads,
        group=group,
        dim=int(pick(rng, *INSTANCES, pick(rng, *OTHERS))),
        len_q=len_q,
        len_k=lengths(rng, len_q, int(longest)),
        page=page_size(rng),
    )


def chunks(rng: Rng) -> Sizes:
    """swap, and q tiles of wide in parts: on Hopper, more rows than few that see many keys; decode rows beside them."""
    count, decoding = int(rng.integers(1, 3)), rng.integers(0, 3, int(pick(rng, 0, 2)))
    few = rng.random() < 0.7
    len_q = np.array([*(rng.integers(17, 48, count) if few else rng.integers(48, 129, 1)), *decoding])
    q_dtype = pick(rng, BF16, F16, *FP8)
    return Sizes(
        q_dtype=q_dtype,
        element=element_of(rng, q_dtype),
        kv_heads=int(rng.integers(1, 3)),
        group=int(pick(rng, 4, 5, 8)),
        dim=int(pick(rng, *INSTANCES, pick(rng, 16, 80, 96, 112, 136))),
        len_q=len_q,
        len_k=len_q + rng.integers(512 if few else 4096, 1000 if few else 4500, len(len_q)),
        page=int(pick(rng, 0, 8, 16, 24, 64, 128)),
    )


def many_queries(rng: Rng) -> Array:
    """Queries of some sequences, at least one of which is of many; others may decode."""
    count = int(rng.integers(1, 4))
    decoding = rng.integers(0, 3, int(pick(rng, 0, 2)))
    return rng.permutation([*rng.integers(48, int(pick(rng, 64, 130, 300)), count), *decoding])


def wide(rng: Rng) -> Sizes:
    """wide: on Hopper, at least 48 queries a sequence; keys of 16 bits or fp8, and fp8 queries of fp8 keys."""
    len_q, q_dtype = many_queries(rng), pick(rng, BF16, F16, BF16, F16, *FP8)
    return Sizes(
        q_dtype=q_dtype,
        element=element_of(rng, q_dtype),
        kv_heads=int(rng.integers(1, 3)),
        group=int(pick(rng, 1, 2, 3, 4, 5)),
        dim=int(pick(rng, *INSTANCES, pick(rng, 8, 40, 72, 80, 96, 112, 136, 200))),
        len_q=len_q,
        len_k=lengths(rng, len_q, int(pick(rng, 20, 400))),
        page=int(pick(rng, 0, 8, 16, 24, 64, 128, 1, 2, 4, 7)),
    )


def tile(rng: Rng) -> Sizes:
    """tile: what wide does not serve, by the head size or fewer queries."""
    kind = pick(rng, "head size", "fewer")
    q_dtype = pick(rng, BF16, F16, *FP8)
    dim = pick(rng, 1, 7, 46, 100, 255) if kind == "head size" else pick(rng, *INSTANCES, *OTHERS)
    len_q = rng.integers(20, 48, 3) if kind == "fewer" else many_queries(rng)
    return Sizes(
        q_dtype=q_dtype,
        element=element_of(rng, q_dtype),
        kv_heads=int(rng.integers(1, 3)),
        group=int(rng.integers(4, 7) if kind == "fewer" else rng.integers(2, 5)),
        dim=int(dim),
        len_q=len_q,
        len_k=lengths(rng, len_q, 200),
        page=page_size(rng),
    )


def tile32(rng: Rng) -> Sizes:
    """split32 and tile32: float32 queries, few or many."""
    len_q = rng.integers(0, 3, 5) if rng.random() < 0.5 else rng.integers(0, 70, 3)
    return Sizes(
        q_dtype=F32,
        element=element_of(rng, F32),
        kv_heads=int(rng.integers(1, 3)),
        group=int(rng.integers(1, 9)),
        dim=int(pick(rng, *INSTANCES, *OTHERS)),
        len_q=len_q,
        len_k=lengths(rng, len_q, 200),
        page=page_size(rng),
    )


def other_values(rng: Rng, sizes: Sizes, step: int = 1) -> Sizes:
    """Sometimes with values of another head size."""
    return sizes._replace(v_dim=step * int(rng.integers(1, 256 // step + 1))) if rng.random() < 0.3 else sizes


# --- calls ----------------------------------------------------------------------------------------------------------


def few_call(rng: Rng) -> Call:
    return bounded(rng, driver.attention_call(rng, other_values(rng, few_queries(rng))), always=False)


def pairs_call(rng: Rng) -> Call:
    """swap, two heads of 80 or 96 at a time: they lie side by side, with room for much to read."""
    group = int(pick(rng, 1, 2, 3, 4, 8))
    sizes = sixteen_bits(rng, few_queries(rng))._replace(
        dim=int(pick(rng, 80, 96)), kv_heads=int(pick(rng, 2, 4)), group=group
    )
    len_q = rng.integers(0, 8 // group + 1, len(sizes.len_q))
    sizes = sizes._replace(len_q=len_q, len_k=lengths(rng, len_q, 1000), page=int(pick(rng, 8, 16, 24, 64)))
    call = driver.attention_call(rng, sizes)
    while call.scalars["layout"] != "NHD":
        call = driver.attention_call(rng, sizes)
    table = call.tensors["block_table"]
    width = 2**17 // (sizes.kv_heads * sizes.page * len(table)) + 1
    call.tensors["block_table"] = np.pad(table, ((0, 0), (0, width)), constant_values=-1)
    call.scalars.update({"max_seqlen_q": max(int(len_q.max()), 1), "batch_invariant": 0})
    return call


def many_call(rng: Rng) -> Call:
    """swap, with three thread blocks on a multiprocessor: so many sequences that they may be short."""
    kv_heads, dim = pick(rng, (4, 16), (8, 72), (8, 128))
    len_q = rng.integers(0, 2, 2**14 // int(kv_heads) + 1)
    sizes = sixteen_bits(rng, few_queries(rng))._replace(
        dim=int(dim),
        kv_heads=int(kv_heads),
        group=int(pick(rng, 1, 4)),
        len_q=len_q,
        len_k=rng.integers(0, 9, len(len_q)),
        page=8,
    )
    sizes.len_k[rng.integers(len(len_q), size=2)] = rng.integers(500, 1000, 2)
    call = driver.attention_call(rng, sizes)
    call.scalars.update({"max_seqlen_q": 1, "batch_invariant": 0})
    return call


def wide_attention_call(rng: Rng, sizes: Sizes) -> Call:
    call = driver.attention_call(rng, other_values(rng, sizes, 8))
    call.tensors.pop("alibi_slopes", None)
    return bounded(rng, call, always=True)


def fixed_call(rng: Rng) -> Call:
    """wide, with so many keys that thread blocks share them where batch_invariant lets them."""
    sizes = chunks(rng)
    len_q = np.where(rng.random(len(sizes.len_q)) < 0.5, sizes.len_q, 1)
    sizes = sizes._replace(len_q=len_q, len_k=len_q + rng.integers(0, 6000, len(len_q)))
    sizes.len_k[0] = len_q[0] + rng.integers(2100, 6000)
    call = wide_attention_call(rng, sizes)
    call.scalars["batch_invariant"] = 1
    return call


def short_call(rng: Rng) -> Call:
    """wide, with so many short sequences that q tiles have all query heads of a KV head."""
    len_q = rng.integers(0, int(pick(rng, 30, 70, 140)), int(rng.integers(18, 40)))
    sizes = wide(rng)._replace(
        len_q=len_q,
        len_k=len_q + rng.integers(0, int(pick(rng, 2, 400)), len(len_q)),
        kv_heads=int(pick(rng, 2, 3)),
        group=int(pick(rng, 4, 5, 8)),
    )
    call = wide_attention_call(rng, sizes)
    call.scalars["batch_invariant"] = 0
    return call


def chunk_call(rng: Rng) -> Call:
    return bounded(rng, driver.attention_call(rng, chunks(rng)), always=True)


def wide_call(rng: Rng) -> Call:
    return wide_attention_call(rng, wide(rng))


def e4m3_call(rng: Rng) -> Call:
    """wide, with products of e4m3."""
    sizes = pick(rng, wide, chunks)(rng)
    dim = math.ceil(sizes.dim / 16) * 16
    return wide_attention_call(rng, sizes._replace(q_dtype=FP8[0], element=FP8[0], dim=dim))


def odd_call(rng: Rng) -> Call:
    """wide and swap, with heads that do not all begin and end at multiples of 16 bytes, but at those of 4."""
    sizes = pick(rng, wide, chunks, few_queries)(rng)
    if rng.random() < 0.5:
        sizes = sixteen_bits(rng, sizes)
    fp8 = sizes.element in FP8
    dim = 16 * int(rng.integers(0, 16)) + int(pick(rng, 4, 8, 12) if fp8 else pick(rng, 2, 4, 6, 10, 12, 14))
    call = driver.attention_call(rng, other_values(rng, sizes._replace(dim=dim), 4 if fp8 else 2))
    if not fp8:
        call.tensors.pop("alibi_slopes", None)
    return bounded(rng, call, always=True)


def alibi_call(rng: Rng) -> Call:
    call = driver.attention_call(rng, other_values(rng, wide(rng), 8))
    call.tensors["alibi_slopes"] = rng.random(call.tensors["q"].shape[1:2]).astype(np.float32)
    return bounded(rng, call, always=True)


def tile_call(rng: Rng) -> Call:
    return bounded(rng, driver.attention_call(rng, other_values(rng, tile(rng))), always=True)


def tile32_call(rng: Rng) -> Call:
    return driver.attention_call(rng, other_values(rng, tile32(rng)))


def large_sizes(
    rng: Rng, dims: tuple[int, int], q_dtype: np.dtype, len_q: Array, past: int, group: int
) -> Sizes:
    """Head sizes of large, and of swap with heads above 256. past: see `lengths`."""
    return Sizes(
        q_dtype=q_dtype,
        element=element_of(rng, q_dtype),
        kv_heads=int(rng.integers(1, 3)),
        group=group,
        dim=dims[0],
        len_q=len_q,
        len_k=lengths(rng, len_q, past),
        page=page_size(rng),
        v_dim=dims[1],
    )


def large_call(rng: Rng) -> Call:
    """large and large_split: head sizes above 128 and above 256; few queries and many."""
    dims = pick(rng, (576, 512), (512, 512), (320, 320), (64, 264), (512, 72), (200, 200))
    q_dtype = pick(rng, BF16, F16, BF16, F16, *FP8)
    len_q = rng.permutation([*rng.integers(0, 4, 2), rng.integers(17, 60)])
    sizes = large_sizes(rng, dims, q_dtype, len_q, 200, int(rng.integers(4, 9)))
    return bounded(rng, driver.attention_call(rng, sizes), always=True)


def large_few_call(rng: Rng) -> Call:
    """swap, with head sizes above 256: at most 16 rows of a KV head."""
    dims = pick(rng, (576, 512), (512, 512), (320, 320), (300, 264), (64, 504))
    group = int(pick(rng, 1, 4, 9, 16))
    q_dtype = pick(rng, BF16, F16, BF16, F16, *FP8)
    sizes = large_sizes(rng, dims, q_dtype, rng.integers(0, 16 // group + 1, 5), 700, group)
    call = driver.attention_call(rng, sizes)
    call.scalars.update({"max_seqlen_q": 16 // group, "batch_invariant": 0})
    return call


def large_cluster_call(rng: Rng) -> Call:
    """large and large_split in clusters of thread blocks: many rows, and keys that TMA can load."""
    dims = pick(rng, (576, 512), (512, 512), (320, 320), (264, 72), (8, 384))
    q_dtype, group = pick(rng, BF16, F16), int(pick(rng, 9, 66, 128, 130))
    len_q = rng.permutation([*rng.integers(0, 3, 3), rng.integers(9, 40)])
    sizes = large_sizes(rng, dims, q_dtype, len_q, 500, group)
    sizes = sizes._replace(element=q_dtype, page=int(pick(rng, 8, 16, 24, 64, 128)))
    call = bounded(rng, driver.attention_call(rng, sizes), always=True)
    call.scalars.update({"batch_invariant": 0})
    return call


def copies_call(rng: Rng) -> Call:
    """wide and large, on copies of the keys: many rows see each, and they are fp8, or in small pages or odd heads."""
    dims = pick(
        rng, (64, 64), (128, 128), (192, 128), (100, 100), (250, 98), (512, 512), (576, 512), (264, 72)
    )
    q_dtype = pick(rng, BF16, F16)
    sizes = large_sizes(rng, dims, q_dtype, np.zeros(0, int), 0, 16)
    # In two sequences. Small calls have copies only with heads above 256.
    least = 200 if max(dims) > 256 else 3 * tokens_with_copies(sizes.kv_heads * sizes.group, dims) // 2
    len_q = rng.permutation([rng.integers(least, least + 100), rng.integers(0, 4)])
    sizes = sizes._replace(len_q=len_q, len_k=lengths(rng, len_q, 300))
    if rng.random() < 0.5:
        if max(dims) <= 256 and sum(dims) % 16 == 0:
            q_dtype = pick(rng, q_dtype, FP8[0])  # products of e4m3
        sizes = sizes._replace(q_dtype=q_dtype, element=q_dtype, page=int(pick(rng, 1, 3, 4, 17)))
    else:
        sizes = sizes._replace(element=pick(rng, *FP8))
    call = bounded(rng, driver.attention_call(rng, sizes), always=True)
    call.scalars.update({"batch_invariant": 0})
    return call


def apart_call(rng: Rng) -> Call:
    """Any head sizes of keys and values, which differ, or large ones; few queries or many."""
    dims = pick(rng, (576, 512), (192, 128), (1, 3), (40, 72), (512, 512), (driver.head_sizes(rng)))
    return any_attention_call(rng, pick(rng, *FLOATS, *FP8), dims)


def general_call(rng: Rng) -> Call:
    """general: head sizes above 256 with float32, or those that are no multiple of 8."""
    if rng.random() < 0.5:
        return any_attention_call(rng, F32, pick(rng, (576, 512), (320, 320), (264, 8)))
    return any_attention_call(rng, pick(rng, BF16, F16, *FP8), pick(rng, (300, 300), (575, 511), (12, 258)))


def any_attention_call(rng: Rng, q_dtype: np.dtype, dims: tuple[int, int]) -> Call:
    """A call with few queries or many, of head sizes D and Dv."""
    len_q = rng.integers(0, 4, 4) if rng.random() < 0.5 else rng.integers(0, 60, 2)
    dim, v_dim = dims
    sizes = Sizes(
        q_dtype=q_dtype,
        element=element_of(rng, q_dtype),
        kv_heads=int(rng.integers(1, 3)),
        group=int(rng.integers(1, 9)),
        dim=dim,
        len_q=len_q,
        len_k=lengths(rng, len_q, 100),
        page=page_size(rng),
        v_dim=v_dim,
    )
    return driver.attention_call(rng, sizes)


def sixteen_bits(rng: Rng, sizes: Sizes) -> Sizes:
    """The only ones that tensor cores differentiate."""
    dtype = pick(rng, BF16, F16)
    return sizes._replace(q_dtype=dtype, element=dtype)


def wide_gradients_call(rng: Rng) -> Call:
    """wide: on Hopper, 16 bits."""
    dim = int(pick(rng, 64, 128, 256, 64, 128, 72, 96, 136, 192))
    sizes = other_values(rng, sixteen_bits(rng, wide(rng))._replace(dim=dim), 8)
    call = driver.attention_backward_call(rng, sizes)
    call.scalars["deterministic"] = int(rng.integers(2))
    return call


def tile_gradients_call(rng: Rng) -> Call:
    """tile: all KV heads are one in memory, which TMA does not take."""
    sizes = sixteen_bits(rng, wide(rng))._replace(dim=int(pick(rng, 64, 128, 136, 192, 256)), kv_heads=2)
    call = driver.attention_backward_call(rng, other_values(rng, sizes, 8))
    name = pick(rng, "k", "v")
    call.tensors[name] = expanded(call.tensors[name])
    return call


def tile32_gradients_call(rng: Rng) -> Call:
    """tile32: float32."""
    sizes = wide(rng)._replace(q_dtype=F32, element=F32, dim=int(pick(rng, 64, 128, 256, 4, 20, 72, 136)))
    return driver.attention_backward_call(rng, other_values(rng, sizes, 4))


def copies_gradients_call(rng: Rng) -> Call:
    """wide and tile32, on copies of tensors whose heads are no multiple of 16 bytes."""
    dtype = pick(rng, *FLOATS)
    dims = pick(rng, (100, 100), (60, 60), (36, 100), (99, 99), (128, 99), (250, 250), (1, 3))
    sizes = wide(rng)._replace(q_dtype=dtype, element=dtype, dim=dims[0], v_dim=dims[1])
    return driver.attention_backward_call(rng, sizes)


def general_gradients_call(rng: Rng) -> Call:
    """general: head sizes above 256."""
    dtype = pick(rng, *FLOATS)
    dim, v_dim = pick(rng, (576, 512), (320, 320), (264, 8), (301, 99), (12, 258))
    sizes = wide(rng)._replace(q_dtype=dtype, element=dtype, dim=dim, v_dim=v_dim)
    return driver.attention_backward_call(rng, sizes)


def bounded(rng: Rng, call: Call, always: bool) -> Call:
    """With max_seqlen_q unknown or that of the tokens: a smaller one lets swap or split serve every sequence."""
    if always or rng.random() < 0.8:
        call.scalars["max_seqlen_q"] = int(pick(rng, max(call.tensors["q"].shape[0], 1), 2**31 - 1))
    return call


def big_kv_cache_call(rng: Rng) -> Call:
    """So many tokens that each thread of the kernel writes several."""
    heads, dim, page = 8, int(pick(rng, 128, 192, 255)), int(pick(rng, 16, 17))
    dtype = pick(rng, *FLOATS)
    element = pick(rng, dtype, *FP8)
    # Columns of up to 16 bytes or 8 elements; of one element in odd head sizes.
    width = 1 if dim % 2 else 8 if element in FP8 else 16 // dtype.itemsize
    columns = 2 * heads * dim // width
    tokens = (1 << 18) // columns + int(rng.integers(1, 40))
    layout, blocks = driver.layout_of(rng, dim, dim), tokens // page + 2
    shapes = driver.cache_shapes(layout, blocks, page, heads, dim, dim)
    block = driver.floats(rng, (64, heads, dim), dtype)
    tensors = {
        **{name: np.resize(block, (tokens, heads, dim)) for name in ("key", "value")},
        **{n: np.zeros(s, element) for n, s in zip(("key_cache", "value_cache"), shapes, strict=False)},
        "slot_mapping": driver.spoil(rng, driver.slots_of(rng, tokens, blocks * page)),
    }
    if rng.random() < 0.5:
        tensors["k_scale"] = rng.uniform(0.1, 2, (heads,)).astype(np.float32)
    return Call("kv_cache", tensors, {"layout": layout, "cache_dtype": element.name})


# In turn, so that a few calls meet all.
CALLS: tuple[Callable[[Rng], Call], ...] = (
    few_call,
    wide_call,
    tile_call,
    chunk_call,
    driver.kv_cache_call,
    few_call,
    wide_call,
    tile32_call,
    driver.merge_states_call,
    alibi_call,
    apart_call,
    general_call,
    wide_gradients_call,
    large_call,
    large_few_call,
    large_cluster_call,
    driver.attention_call,
    tile_gradients_call,
    tile32_gradients_call,
    copies_gradients_call,
    general_gradients_call,
    driver.attention_backward_call,
    pairs_call,
    fixed_call,
    fixed_call,  # of these only some have strides for wide
    short_call,
    odd_call,
    e4m3_call,
    copies_call,
)
# The others' turns come seldom: these calls are large. They take the turn of another call each time.
BIG_KV_CACHE_EVERY, MANY_EVERY = 31, 35
assert math.gcd(BIG_KV_CACHE_EVERY, len(CALLS)) == 1
# What the library says of an engine's instances that have calls of their own here.
SPECIAL = {
    "two KV heads": "swap of pairs",
    "three thread blocks": "swap of many",
    "threads copy the keys": "swap of copies",
    "fixed parts": "wide of fixed parts",
    "all query heads": "wide of several heads",
    "copies of keys": "copies of keys",
    "not of whole 16 bytes": "wide of odd heads",
    "two thread blocks": "large in clusters",
    "aligned copies": "aligned copies",
}
UPDATED = ("key_cache", "value_cache", "k", "v")
GRADIENTS = "attention_backward"


class Smoke:
    """Runs calls, and counts what served them."""

    def __init__(self, platform: str) -> None:
        self.library = native.library(platform)
        self.memory: Memory = Gpu() if platform == "cuda" else Host()
        self.served: collections.Counter[str] = collections.Counter()
        self.refused = 0

    def run(self, call: Call, rng: Rng, overrun: bool = False) -> None:
        operation, arrays, scalars = call
        prepared = bool(rng.random() < 0.5)
        strided = not overrun and rng.random() < 0.4
        results = self.library.operation(operation).of_kind("result")
        buffers = {}
        for name, array in arrays.items():
            # The engines of a plan are chosen before addresses are known: it is for aligned tensors.
            apart = steps(rng, array, shift=not prepared) if strided and rng.random() < 0.4 else (1, 0, 0)
            array = poisoned(array) if name in results else without_poison(array)
            buffers[name] = Buffer.of(array, apart)
        try:
            tensors = {name: buffer.place(self.memory) for name, buffer in buffers.items()}
            self._launch(operation, tensors, scalars, prepared, rng, overrun)
            self.memory.synchronize()
            for name in (*results, *UPDATED):
                if name in buffers and buffers[name].flat.size and not self.library.check_indices:
                    check_written(operation, name, buffers[name], self.memory, whole=name in results)
        finally:
            with contextlib.suppress(CudaError):  # the first error is raised already
                self.memory.free()

    def _launch(
        self,
        operation: str,
        tensors: dict[str, Placed],
        scalars: Scalars,
        prepared: bool,
        rng: Rng,
        overrun: bool,
    ) -> None:
        fields = self.library.operation(operation)
        needs = self._needs(operation, tensors, scalars)
        of = " of gradients" if operation == GRADIENTS else ""
        self.served.update({kernel.name + of for kernel in needs.kernels})
        described = " ".join(kernel.description for kernel in needs.kernels)
        self.served.update(name for words, name in SPECIAL.items() if words in described)
        if prepared and needs.plan_bytes:
            (plan,) = fields.of_kind("plan")
            tensors = {**tensors, plan: self._scratch(needs.plan_bytes, rng)}
            # The plan is made from the tensors that it reads; the others have no more than some address.
            known = {plan, *(field.name for field in fields.fields.values() if field.plan == "read")}
            early = {
                n: x if n in known else x._replace(address=native.SOME_ADDRESS) for n, x in tensors.items()
            }
            self._call(operation, driver.arguments(self.library, operation, early, scalars), prepare=1)
            self.served[f"{operation}_plan"] += 1
            needs = self._needs(operation, tensors, scalars)
        if needs.workspace_bytes:
            (workspace,) = fields.of_kind("workspace")
            tensors = {**tensors, workspace: self._scratch(needs.workspace_bytes, rng)}
        args = driver.arguments(self.library, operation, tensors, scalars)
        if overrun:
            driver.enlarge(args)
        self._call(operation, args)
        self.served[operation] += 1

    def _needs(self, operation: str, tensors: dict[str, Placed], scalars: Scalars) -> native.Needs:
        """What a call needs, before its addresses are known."""
        specs = {name: tensor.spec for name, tensor in tensors.items()}
        return self.library.needs(operation, self.library.arguments(operation, specs, scalars))

    def _scratch(self, size: int, rng: Rng) -> Placed:
        """Memory for the library's use; now and then it holds nonsense."""
        address = self.memory.allocate(size)
        if rng.random() < 0.5:
            self.memory.write(address, np.full(size, 0xA5, np.uint8))
        return Placed(native.Spec("uint8", (size,)), address)

    def _call(self, operation: str, args: ctypes.Structure, **context: int) -> None:
        # The copies to the device are over when it starts, whatever its stream.
        self.memory.synchronize()
        problem = self.library.run(operation, args, **self.memory.context, **context)
        if problem is None:
            return
        if "CUDA: " in problem or not self.library.check_indices:
            raise RuntimeError(f"{operation}: {problem}")
        self.refused += 1


def draws(seed: int, calls: int) -> Iterator[tuple[int, str, Call, Rng]]:
    for number in range(calls):
        rng = np.random.default_rng([seed, number])
        make = CALLS[number % len(CALLS)]
        if number % BIG_KV_CACHE_EVERY == BIG_KV_CACHE_EVERY - 1:
            make = big_kv_cache_call
        elif number % MANY_EVERY == MANY_EVERY // 2:
            make = many_call
        yield number, make.__name__, make(rng), rng


def describe(call: Call) -> str:
    arrays = ", ".join(f"{name} {x.dtype.name}{list(x.shape)}" for name, x in call.tensors.items())
    scalars = ", ".join(f"{name} {value}" for name, value in call.scalars.items())
    return f"{arrays}, {scalars}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Random calls of the CUDA library, for compute-sanitizer.")
    parser.add_argument("seed", nargs="?", type=int, default=None, help="drawn when not given")
    parser.add_argument("calls", nargs="?", type=int, default=150)
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", type=int, default=None, metavar="NUMBER", help="this call alone")
    parser.add_argument("--overrun", action="store_true", help="first, a call that memcheck must report")
    options = parser.parse_args()
    seed = secrets.randbits(32) if options.seed is None else options.seed
    smoke = Smoke(options.platform)
    start = time.perf_counter()
    done = 0
    if options.overrun:
        smoke.run(driver.overrun_call(), np.random.default_rng(0), overrun=True)
    for number, kind, call, rng in draws(seed, options.calls):
        if options.only not in (None, number):
            continue
        # A report of the sanitizer follows the line of its call.
        print(f"call {number} of seed {seed}: {kind}: {describe(call)}", flush=True)
        smoke.run(call, rng)
        done += 1
    served = ", ".join(f"{name} {count}" for name, count in sorted(smoke.served.items()))
    print(f"done: {done} calls of seed {seed} in {time.perf_counter() - start:.0f} s: {served}", flush=True)


if __name__ == "__main__":
    main()
