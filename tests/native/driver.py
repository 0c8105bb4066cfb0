"""Calls a native library at random through its C ABI: for a build with sanitizers. Needs numpy, no framework.

    python -m tests.native.driver LIBRARY SEED CALLS

Every buffer is an allocation of its own, to the byte, so that the sanitizer sees each access outside. Index
tensors are valid, slightly wrong or hostile. Results are not looked at: tests/ops does that. With "overrun"
as a fourth argument the library is told of a cache that is larger than its buffer, which must be caught.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from flashxla import native
from flashxla.ops.cache_format import DTYPE_CODES, LAYOUT_CODES

Array = np.ndarray
Rng = np.random.Generator
Call = tuple[native.Native, dict[str, Array], dict[str, int | float]]

HOSTILE = [-(2**63), -(2**31), -(2**31) + 1, -2, -1, 0, 1, 2**16, 2**31 - 1, 2**31, 2**32 + 1, 2**63 - 1]
FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
FP8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))


class Memory:
    """Allocations of malloc, which the sanitizer guards; numpy's own are pooled and rounded up."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._libc.malloc.restype = ctypes.c_void_p
        self._libc.malloc.argtypes = (ctypes.c_size_t,)
        self._libc.free.argtypes = (ctypes.c_void_p,)
        self._addresses: list[int] = []

    def tensor(self, array: Array, strided: bool = False) -> native.CTensor:
        """A guarded copy of an array; strided: with other data between its elements."""
        if strided and array.ndim:
            array = np.repeat(array, 2, axis=-1)
        array = np.ascontiguousarray(array)
        address = self._libc.malloc(max(array.nbytes, 1))
        self._addresses.append(address)
        ctypes.memmove(address, array.ctypes.data, array.nbytes)
        shape, strides = list(array.shape), [s // array.itemsize for s in array.strides]
        if strided and array.ndim:
            shape[-1] //= 2
            strides[-1] *= 2
        result = native.CTensor.of(DTYPE_CODES[array.dtype.name], shape, strides)
        result.address = address
        return result

    def free(self) -> None:
        for address in self._addresses:
            self._libc.free(address)
        self._addresses.clear()


def pick(rng: Rng, *choices: Any) -> Any:
    return choices[rng.integers(len(choices))]


def floats(rng: Rng, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """Random bytes now and then: NaN, infinity and subnormals."""
    if rng.random() < 0.1:
        size = int(np.prod(shape)) * dtype.itemsize
        return np.frombuffer(rng.bytes(size), dtype).reshape(shape)
    return rng.standard_normal(shape, np.float32).astype(dtype)


def spoil(rng: Rng, index: Array) -> Array:
    """Leave an index tensor as it is, or put some wrong or hostile entries into it."""
    kind = rng.integers(3)
    index = index.copy()
    limits = np.iinfo(index.dtype)
    for _ in range(0 if kind == 0 else int(rng.integers(1, 4))):
        if index.size:
            at = rng.integers(index.size)
            near = int(index.flat[at]) + int(rng.integers(-3, 4))
            value = near if kind == 1 else int(pick(rng, *HOSTILE))
            index.flat[at] = min(max(value, limits.min), limits.max)
    return index


def cache_shapes(layout: str, blocks: int, page: int, heads: int, dim: int) -> list[tuple[int, ...]]:
    shapes: dict[str, list[tuple[int, ...]]] = {
        "NHD": [(blocks, page, heads, dim)] * 2,
        "HND": [(blocks, heads, page, dim)] * 2,
        "interleaved": [(blocks, page, 2 * heads, dim)],
        "packed_HND": [(blocks, heads, page, 2 * dim)],
        "packed_NHD": [(blocks, page, heads, 2 * dim)],
        "stacked": [(2, blocks, page, heads, dim)],
    }
    return shapes[layout]


def head_size(rng: Rng) -> int:
    return int(pick(rng, 1, 2, 7, 8, 40, 46, 64, 72, 80, 128, 255, 256, rng.integers(1, 257)))


def kv_cache_call(rng: Rng) -> Call:
    layout = str(pick(rng, *LAYOUT_CODES))
    heads, dim = int(rng.integers(1, 6)), head_size(rng)
    blocks, page, tokens = int(rng.integers(1, 7)), int(pick(rng, 1, 8, 16, 17)), int(rng.integers(0, 20))
    dtype = pick(rng, *FLOATS)
    element = pick(rng, dtype, *FP8)
    stored = pick(rng, element, np.dtype(np.uint8)) if element in FP8 else element
    slots = rng.permutation(blocks * page)[:tokens].astype(pick(rng, np.int32, np.int64))
    shapes = cache_shapes(layout, blocks, page, heads, dim)
    tensors = {
        "key": floats(rng, (tokens + 1, heads, dim), dtype),
        "value": floats(rng, (tokens + 1, heads, dim), dtype),
        **{n: np.zeros(s, stored) for n, s in zip(("key_cache", "value_cache"), shapes, strict=False)},
        "slot_mapping": spoil(rng, slots),
    }
    if rng.random() < 0.5:
        for name in ("k_scale", "v_scale"):
            tensors[name] = rng.uniform(0.1, 2, (pick(rng, 1, heads),)).astype(np.float32)
    attributes: dict[str, int | float] = {
        "layout": LAYOUT_CODES[layout],
        "cache_dtype": DTYPE_CODES[element.name],
    }
    return native.KV_CACHE, tensors, attributes


class Sizes(NamedTuple):
    """What decides which kernel serves a call of attention."""

    q_dtype: np.dtype
    element: np.dtype  # of keys and values
    kv_heads: int
    group: int  # query heads of a KV head
    dim: int
    len_q: Array
    len_k: Array
    page: int  # 0: dense


def attention_sizes(rng: Rng) -> Sizes:
    q_dtype = pick(rng, *FLOATS, *FP8)
    seqs = int(rng.integers(1, 6))
    return Sizes(
        q_dtype=q_dtype,
        element=pick(rng, *FP8) if q_dtype in FP8 else pick(rng, q_dtype, q_dtype, *FP8),
        kv_heads=int(rng.integers(1, 4)),
        group=int(rng.integers(1, 9)),
        dim=head_size(rng),
        len_q=rng.integers(0, 2, seqs) if rng.random() < 0.5 else rng.integers(0, 40, seqs),
        len_k=rng.integers(0, int(pick(rng, 20, 300)), seqs),
        page=int(pick(rng, 1, 8, 16, 17)) if rng.random() < 0.6 else 0,
    )


def attention_call(rng: Rng, sizes: Sizes | None = None) -> Call:
    """A random call of attention, of these sizes."""
    q_dtype, element, kv_heads, group, dim, len_q, len_k, page = sizes or attention_sizes(rng)
    heads, seqs = kv_heads * group, len(len_q)
    tokens = int(len_q.sum()) + int(rng.integers(0, 3))
    out_dtype = FLOATS[2] if q_dtype in FP8 else q_dtype
    tensors = {
        "q": floats(rng, (tokens, heads, dim), q_dtype),
        "cu_seqlens_q": spoil(rng, np.cumsum([0, *len_q]).astype(np.int32)),
        "out": np.zeros((tokens, heads, dim), out_dtype),
    }
    layout = "NHD"
    if page:
        layout = str(pick(rng, *LAYOUT_CODES))
        pages = -(-len_k // page)
        blocks = int(pages.sum()) + 1
        table = rng.integers(0, blocks, (seqs, int(pages.max(initial=0)) + 1)).astype(np.int32)
        stored = pick(rng, element, np.dtype(np.uint8)) if element in FP8 else element
        for name, shape in zip("kv", cache_shapes(layout, blocks, page, kv_heads, dim), strict=False):
            tensors[name] = floats(rng, shape, element).view(stored)
        tensors |= {"block_table": spoil(rng, table), "seqused_k": spoil(rng, len_k.astype(np.int32))}
    else:
        for name in "kv":
            tensors[name] = floats(rng, (int(len_k.sum()), kv_heads, dim), element)
        tensors["cu_seqlens_k"] = spoil(rng, np.cumsum([0, *len_k]).astype(np.int32))
        if rng.random() < 0.5:
            tensors["seqused_k"] = spoil(rng, len_k.astype(np.int32))
    optional = {
        "lse": np.zeros((heads, tokens), np.float32),
        "num_seqs": spoil(rng, np.array([seqs], np.int32)),
        "leftpad_k": spoil(rng, rng.integers(0, 9, seqs).astype(np.int32)),
        "alibi_slopes": rng.random(pick(rng, (heads,), (seqs, heads))).astype(np.float32),
        "sinks": floats(rng, (heads,), pick(rng, *FLOATS)),
    }
    for name in ("q_descale", "k_descale", "v_descale"):
        optional[name] = rng.random(pick(rng, (1,), (kv_heads,), (seqs, kv_heads))).astype(np.float32)
    tensors |= {name: array for name, array in optional.items() if rng.random() < 0.4}
    attributes = {
        "layout": LAYOUT_CODES[layout],
        "kv_dtype": DTYPE_CODES[element.name],
        "causal": int(rng.integers(2)),
        "window_left": int(pick(rng, -1, -1, 0, 5, 2**31 - 1)),
        "window_right": int(pick(rng, -1, -1, 0, 5, 2**31 - 1)),
        "max_seqlen_q": int(pick(rng, len_q.max(), 2**31 - 1, 0)),
        "max_seqlen_k": int(pick(rng, len_k.max(), 2**31 - 1, 0)),
        "softmax_scale": float(pick(rng, dim**-0.5, 1.0, 0.0, -1.0)),
        "softcap": float(pick(rng, 0.0, 10.0)),
    }
    return native.ATTENTION, tensors, attributes


def merge_states_call(rng: Rng) -> Call:
    tokens, heads, dim = int(rng.integers(0, 20)), int(rng.integers(1, 9)), head_size(rng)
    dtype = pick(rng, *FLOATS)
    names = {"out_a": "lse_a", "out_b": "lse_b", "out": "lse"}
    tensors = {}
    for out, lse in names.items():
        tensors[out] = floats(rng, (tokens, heads, dim), dtype)
        tensors[lse] = floats(rng, (heads, tokens), FLOATS[0])
    return native.MERGE_STATES, tensors, {}


def run(library: native.Library, memory: Memory, call: Call, rng: Rng, overrun: bool) -> None:
    operation, arrays, attributes = call
    tensors = {name: memory.tensor(array, rng.random() < 0.2) for name, array in arrays.items()}
    if overrun:
        tensors["key_cache"].shape[0] += 1
    context = {"num_threads": int(rng.integers(1, 4))}
    problem = library.run(operation, library.arguments(operation, tensors, attributes), **context)
    if problem and not library.check_indices:
        raise RuntimeError(f"{operation.name}: {problem}")
    memory.free()


def overrun_call() -> Call:
    """A write to the last slot of a cache that is one block smaller than the library is told."""
    tensors = {
        "key": np.ones((1, 1, 8), np.float32),
        "value": np.ones((1, 1, 8), np.float32),
        "key_cache": np.zeros((1, 4, 1, 8), np.float32),
        "value_cache": np.zeros((2, 4, 1, 8), np.float32),
        "slot_mapping": np.array([7], np.int32),
    }
    return native.KV_CACHE, tensors, {"layout": 0, "cache_dtype": 0}


def main(path: str, seed: str, calls: str, mode: str = "") -> None:
    library, memory = native.Library("cpu", Path(path)), Memory()
    if mode == "overrun":
        run(library, memory, overrun_call(), np.random.default_rng(0), overrun=True)
    for number in range(int(calls)):
        # A report of the sanitizer ends the process: this line says how to repeat the call alone.
        print(f"call {number} of seed {seed}", flush=True)
        rng = np.random.default_rng([int(seed), number])
        make = pick(rng, kv_cache_call, attention_call, attention_call, merge_states_call)
        run(library, memory, make(rng), rng, overrun=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
