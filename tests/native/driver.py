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
from flashxla.ops.cache_format import ONE_TENSOR_DIMS, PAIR_DIMS

Array = np.ndarray
Rng = np.random.Generator
Scalars = dict[str, float | str]


class Call(NamedTuple):
    """A call of the C ABI, by field."""

    operation: str
    tensors: dict[str, Array]
    scalars: Scalars


class Placed(NamedTuple):
    """A tensor in memory."""

    spec: native.Spec
    address: int


HOSTILE = [-(2**63), -(2**31), -(2**31) + 1, -2, -1, 0, 1, 2**16, 2**31 - 1, 2**31, 2**32 + 1, 2**63 - 1]
FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
FP8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
MAX_HEAD_SIZE, MAX_VALUE_HEAD_SIZE = 576, 512  # of queries and keys, of values


class Memory:
    """Allocations of malloc, which the sanitizer guards; numpy's own are pooled and rounded up."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._libc.malloc.restype = ctypes.c_void_p
        self._libc.malloc.argtypes = (ctypes.c_size_t,)
        self._libc.free.argtypes = (ctypes.c_void_p,)
        self._addresses: list[int] = []

    def tensor(self, array: Array, strided: bool = False) -> Placed:
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
        return Placed(native.Spec(array.dtype.name, tuple(shape), tuple(strides)), address)

    def free(self) -> None:
        for address in self._addresses:
            self._libc.free(address)
        self._addresses.clear()


def arguments(
    library: native.Library, operation: str, tensors: dict[str, Placed], scalars: Scalars
) -> ctypes.Structure:
    """The arguments of an operation, with the tensors' addresses."""
    args = library.arguments(operation, {name: x.spec for name, x in tensors.items()}, scalars)
    for name, tensor in tensors.items():
        getattr(args, name).data = tensor.address
    return args


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


def cache_shapes(
    layout: str, blocks: int, page: int, heads: int, dim: int, v_dim: int
) -> list[tuple[int, ...]]:
    """Of one tensor or two; dim and v_dim are one there."""
    if layout in PAIR_DIMS:
        pages = (page, heads) if layout == "NHD" else (heads, page)
        return [(blocks, *pages, dim), (blocks, *pages, v_dim)]
    shapes: dict[str, tuple[int, ...]] = {
        "interleaved": (blocks, page, 2 * heads, dim),
        "packed_HND": (blocks, heads, page, 2 * dim),
        "packed_NHD": (blocks, page, heads, 2 * dim),
        "stacked": (2, blocks, page, heads, dim),
    }
    return [shapes[layout]]


def layout_of(rng: Rng, dim: int, v_dim: int) -> str:
    """Any that holds keys and values of these sizes."""
    return str(pick(rng, *PAIR_DIMS, *(ONE_TENSOR_DIMS if dim == v_dim else ())))


def head_size(rng: Rng, most: int) -> int:
    usual = (1, 2, 7, 8, 40, 46, 64, 72, 80, 128, 255, 256, rng.integers(1, 257))
    return int(
        pick(rng, *usual, *((257, 320, most, rng.integers(1, most + 1)) if rng.random() < 0.3 else ()))
    )


def head_sizes(rng: Rng) -> tuple[int, int]:
    """Of keys and of values: mostly the same."""
    if rng.random() < 0.7:
        return (head_size(rng, MAX_VALUE_HEAD_SIZE),) * 2
    pairs = (MAX_HEAD_SIZE, MAX_VALUE_HEAD_SIZE), (192, 128), (1, 3), (40, 72)
    return pick(rng, *pairs, (head_size(rng, MAX_HEAD_SIZE), head_size(rng, MAX_VALUE_HEAD_SIZE)))


def new_dtype(rng: Rng, element: np.dtype) -> np.dtype:
    """What may be written into a cache of such elements: the same, which is copied, or a float into fp8."""
    return pick(rng, element, *FLOATS) if element in FP8 else element


def slots_of(rng: Rng, count: int, slots: int) -> Array:
    """At most so many slots of a cache, each at most once."""
    return rng.permutation(slots)[:count].astype(pick(rng, np.int32, np.int64))


def kv_cache_call(rng: Rng) -> Call:
    dim, v_dim = head_sizes(rng)
    layout, heads = layout_of(rng, dim, v_dim), int(rng.integers(1, 6))
    blocks, page, tokens = int(rng.integers(1, 7)), int(pick(rng, 1, 8, 16, 17)), int(rng.integers(0, 20))
    element = pick(rng, *FLOATS, *FP8)
    dtype = new_dtype(rng, element)
    stored = pick(rng, element, np.dtype(np.uint8)) if element in FP8 else element
    shapes = cache_shapes(layout, blocks, page, heads, dim, v_dim)
    tensors = {
        "key": floats(rng, (tokens + 1, heads, dim), dtype),
        "value": floats(rng, (tokens + 1, heads, v_dim), dtype),
        **{n: np.zeros(s, stored) for n, s in zip(("key_cache", "value_cache"), shapes, strict=False)},
        "slot_mapping": spoil(rng, slots_of(rng, tokens, blocks * page)),
    }
    if rng.random() < 0.5:
        for name in ("k_scale", "v_scale"):
            tensors[name] = rng.uniform(0.1, 2, (pick(rng, 1, heads),)).astype(np.float32)
    return Call("kv_cache", tensors, {"layout": layout, "cache_dtype": element.name})


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
    v_dim: int = 0  # 0: dim

    @property
    def dims(self) -> tuple[int, int]:
        """Of keys and of values."""
        return self.dim, self.v_dim or self.dim


def attention_sizes(rng: Rng) -> Sizes:
    q_dtype = pick(rng, *FLOATS, *FP8)
    seqs = int(rng.integers(1, 6))
    dim, v_dim = head_sizes(rng)
    return Sizes(
        q_dtype=q_dtype,
        element=pick(rng, *FP8) if q_dtype in FP8 else pick(rng, q_dtype, q_dtype, *FP8),
        kv_heads=int(rng.integers(1, 4)),
        group=int(rng.integers(1, 9)),
        dim=dim,
        len_q=rng.integers(0, 2, seqs) if rng.random() < 0.5 else rng.integers(0, 40, seqs),
        len_k=rng.integers(0, int(pick(rng, 20, 300)), seqs),
        page=int(pick(rng, 1, 8, 16, 17)) if rng.random() < 0.6 else 0,
        v_dim=v_dim,
    )


def dense_keys(rng: Rng, sizes: Sizes) -> dict[str, Array]:
    """k, v and what finds the keys in them."""
    tensors = {
        name: floats(rng, (int(sizes.len_k.sum()), sizes.kv_heads, dim), sizes.element)
        for name, dim in zip("kv", sizes.dims, strict=True)
    }
    tensors["cu_seqlens_k"] = spoil(rng, np.cumsum([0, *sizes.len_k]).astype(np.int32))
    if rng.random() < 0.5:
        tensors["seqused_k"] = spoil(rng, sizes.len_k.astype(np.int32))
    return tensors


def paged_keys(rng: Rng, sizes: Sizes, layout: str, tokens: int) -> dict[str, Array]:
    """Caches and what finds the keys in them; now and then with new keys that are to be written first."""
    page, element, kv_heads = sizes.page, sizes.element, sizes.kv_heads
    pages = -(-sizes.len_k // page)
    blocks = int(pages.sum()) + 1
    table = rng.integers(0, blocks, (len(pages), int(pages.max(initial=0)) + 1)).astype(np.int32)
    stored = pick(rng, element, np.dtype(np.uint8)) if element in FP8 else element
    shapes = cache_shapes(layout, blocks, page, kv_heads, *sizes.dims)
    tensors = {name: floats(rng, s, element).view(stored) for name, s in zip("kv", shapes, strict=False)}
    tensors |= {"block_table": spoil(rng, table), "seqused_k": spoil(rng, sizes.len_k.astype(np.int32))}
    if rng.random() < 0.5:
        dtype = new_dtype(rng, element)
        for name, dim in zip(("key", "value"), sizes.dims, strict=True):
            tensors[name] = floats(rng, (tokens, kv_heads, dim), dtype)
        if rng.random() < 0.5:
            count = int(rng.integers(0, tokens + 1))
            tensors["slot_mapping"] = spoil(rng, slots_of(rng, count, blocks * page))
    return tensors


def attention_call(rng: Rng, sizes: Sizes | None = None) -> Call:
    """A random call of attention, of these sizes."""
    sizes = sizes or attention_sizes(rng)
    len_q, len_k, kv_heads = sizes.len_q, sizes.len_k, sizes.kv_heads
    heads, seqs = kv_heads * sizes.group, len(len_q)
    tokens = int(len_q.sum()) + int(rng.integers(0, 3))
    out_dtype = FLOATS[2] if sizes.q_dtype in FP8 else sizes.q_dtype
    dim, v_dim = sizes.dims
    layout = layout_of(rng, dim, v_dim) if sizes.page else "NHD"
    tensors = {
        "q": floats(rng, (tokens, heads, dim), sizes.q_dtype),
        "cu_seqlens_q": spoil(rng, np.cumsum([0, *len_q]).astype(np.int32)),
        "out": np.zeros((tokens, heads, v_dim), out_dtype),
        **(paged_keys(rng, sizes, layout, tokens) if sizes.page else dense_keys(rng, sizes)),
    }
    optional = {
        "lse": np.zeros((heads, tokens), np.float32),
        "num_seqs": spoil(rng, np.array([seqs], np.int32)),
        "leftpad_k": spoil(rng, rng.integers(0, 9, seqs).astype(np.int32)),
        "alibi_slopes": rng.random(pick(rng, (heads,), (seqs, heads))).astype(np.float32),
        "sinks": floats(rng, (heads,), pick(rng, *FLOATS)),
    }
    of_sequences = [] if "key" in tensors else [(seqs, kv_heads)]
    for name, more in (
        ("q_descale", [(seqs, kv_heads)]),
        ("k_descale", of_sequences),
        ("v_descale", of_sequences),
    ):
        optional[name] = rng.random(pick(rng, (1,), (kv_heads,), *more)).astype(np.float32)
    tensors |= {name: array for name, array in optional.items() if rng.random() < 0.4}
    scalars: Scalars = {
        "layout": layout,
        "kv_dtype": sizes.element.name,
        "causal": int(rng.integers(2)),
        "window_left": int(pick(rng, -1, -1, 0, 5, 2**31 - 1)),
        "window_right": int(pick(rng, -1, -1, 0, 5, 2**31 - 1)),
        "max_seqlen_q": int(pick(rng, len_q.max(), 2**31 - 1, 0)),
        "max_seqlen_k": int(pick(rng, len_k.max(), 2**31 - 1, 0)),
        "softmax_scale": float(pick(rng, dim**-0.5, 1.0, 0.0, -1.0)),
        "softcap": float(pick(rng, 0.0, 10.0)),
        "batch_invariant": int(rng.random() < 0.1),
    }
    return Call("attention", tensors, scalars)


def attention_backward_call(rng: Rng, sizes: Sizes | None = None) -> Call:
    """The gradients of a random call of attention over dense keys, of these sizes."""
    if sizes is None:
        dtype = pick(rng, *FLOATS)
        sizes = attention_sizes(rng)._replace(q_dtype=dtype, element=dtype)
    dtype = sizes.q_dtype
    _, of, scalars = attention_call(rng, sizes._replace(page=0))
    heads, tokens = of["q"].shape[1::-1]
    tensors = {name: of[name] for name in of.keys() - {"lse", "q_descale", "k_descale", "v_descale"}}
    tensors |= {
        "out": floats(rng, of["out"].shape, dtype),
        "lse": floats(rng, (heads, tokens), FLOATS[0]),
        "grad_out": floats(rng, of["out"].shape, dtype),
        **{f"grad_{name}": np.zeros_like(of[name]) for name in "qkv"},
    }
    if rng.random() < 0.4:
        tensors["grad_lse"] = floats(rng, (heads, tokens), FLOATS[0])
    if "sinks" in of:
        tensors["grad_sinks"] = np.zeros_like(of["sinks"])
    of_the_forward = ("layout", "kv_dtype", "batch_invariant")
    scalars = {name: value for name, value in scalars.items() if name not in of_the_forward}
    return Call("attention_backward", tensors, scalars | {"deterministic": int(rng.integers(2))})


def merge_states_call(rng: Rng) -> Call:
    tokens, heads, dim = int(rng.integers(0, 20)), int(rng.integers(1, 9)), head_size(rng, MAX_HEAD_SIZE)
    dtype = pick(rng, *FLOATS)
    names = {"out_a": "lse_a", "out_b": "lse_b", "out": "lse"}
    tensors = {}
    for out, lse in names.items():
        tensors[out] = floats(rng, (tokens, heads, dim), dtype)
        tensors[lse] = floats(rng, (heads, tokens), FLOATS[0])
    return Call("merge_states", tensors, {})


def run(library: native.Library, memory: Memory, call: Call, rng: Rng, overrun: bool) -> None:
    operation, arrays, scalars = call
    tensors = {name: memory.tensor(array, rng.random() < 0.2) for name, array in arrays.items()}
    # What it needs is known before the addresses are.
    needs = library.needs(
        operation, library.arguments(operation, {n: x.spec for n, x in tensors.items()}, scalars)
    )
    assert needs.kernels and needs.plan_bytes == needs.workspace_bytes == 0, needs
    args = arguments(library, operation, tensors, scalars)
    if overrun:
        enlarge(args)
    problem = library.run(operation, args, num_threads=int(rng.integers(1, 4)))
    if problem and not library.check_indices:
        raise RuntimeError(f"{operation}: {problem}")
    memory.free()


def enlarge(args: Any) -> None:
    """Tell the library of caches with a block more than they have."""
    args.key_cache.shape[0] += 1
    args.value_cache.shape[0] += 1


def overrun_call() -> Call:
    """A write to the last slot of caches that are one block smaller than the library is told."""
    tensors = {
        "key": np.ones((1, 1, 8), np.float32),
        "value": np.ones((1, 1, 8), np.float32),
        "key_cache": np.zeros((1, 4, 1, 8), np.float32),
        "value_cache": np.zeros((1, 4, 1, 8), np.float32),
        "slot_mapping": np.array([7], np.int32),
    }
    return Call("kv_cache", tensors, {"layout": "NHD", "cache_dtype": "float32"})


def main(path: str, seed: str, calls: str, mode: str = "") -> None:
    library, memory = native.Library("cpu", Path(path)), Memory()
    if mode == "overrun":
        run(library, memory, overrun_call(), np.random.default_rng(0), overrun=True)
    for number in range(int(calls)):
        # A report of the sanitizer ends the process: this line says how to repeat the call alone.
        print(f"call {number} of seed {seed}", flush=True)
        rng = np.random.default_rng([int(seed), number])
        make = pick(
            rng, kv_cache_call, attention_call, attention_call, attention_backward_call, merge_states_call
        )
        run(library, memory, make(rng), rng, overrun=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
