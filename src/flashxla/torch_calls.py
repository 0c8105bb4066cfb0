"""A resolved call on torch tensors: checking their arguments, and running the native library on their memory.

The counterpart of `jax_calls`. What depends on shapes, dtypes and strides alone is worked out once and kept, so
that a call that repeats costs little more than its kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flashxla import cuda_attention, native
from flashxla.ops.attention import ATTENTION
from flashxla.ops.cache_format import DTYPE_CODES
from flashxla.ops.op import Aval, Call, Op

_DTYPE_NAMES = {getattr(torch, name): name for name in DTYPE_CODES}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}

Arguments = dict[str, Any]


class Layout(NamedTuple):
    """A tensor without its data."""

    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor | None) -> Layout | None:
        """The layout of a tensor, None for an absent one."""
        return None if tensor is None else cls(tensor.shape, tensor.dtype, tensor.stride(), tensor.device)


Layouts = tuple[Layout | None, ...]


def layouts_and_scalars(op: Op, arguments: Arguments) -> tuple[Layouts, tuple[Any, ...]]:
    """What a call's program depends on."""
    return tuple(Layout.of(arguments[t.name]) for t in op.tensors), tuple(
        arguments[s.name] for s in op.scalars
    )


def aval(layout: Layout) -> Aval:
    """Shape and dtype of a tensor, in the declarations' terms."""
    return Aval(tuple(layout.shape), _dtype_name(layout.dtype))


def resolve(op: Op, layouts: Layouts, scalars: tuple[Any, ...]) -> Call:
    """Hold a call against the declaration. Raises TypeError and ValueError."""
    device = layouts[0].device if layouts[0] else None
    avals = {}
    for t, layout in zip(op.tensors, layouts, strict=True):
        avals[t.name] = layout and aval(layout)
        if layout and layout.device != device:
            raise ValueError(
                f"{op.name}: {t.name}: got a tensor on {layout.device}; accepted: {device}, the device of "
                f"{op.tensors[0].name}"
            )
    return op.resolve(avals, dict(zip((s.name for s in op.scalars), scalars, strict=True)))


def empty_results(op: Op, call: Call, like: torch.Tensor) -> list[torch.Tensor]:
    """Tensors for the op's results; one that the call does not compute is empty."""
    results = [like.new_empty(r.shape, dtype=_DTYPES[r.dtype]) for r in call.results]
    missing = len(op.result_names) - len(results)
    return results + [like.new_empty((0,), dtype=torch.float32) for _ in range(missing)]


def run(op: Op, platform: str, arguments: Arguments) -> list[torch.Tensor]:
    """Run an operation on tensors in the memory of `platform`; returns its results."""
    first = arguments[op.tensors[0].name]
    with _on_device_of(first):
        call, template, workspace_bytes = _prepare(op, platform, *layouts_and_scalars(op, arguments))
        results = [] if op.mutated else empty_results(op, call, first)
        args = type(template).from_buffer_copy(template)
        for name, slot in call.operands:
            getattr(args, slot).address = arguments[name].data_ptr()
        for slot, result in zip(op.native.results[: len(call.results)], results, strict=False):
            getattr(args, slot).address = result.data_ptr()
        if workspace_bytes:
            # Free again as soon as the call is made: who gets it next uses it after this, on the same stream.
            workspace = first.new_empty((workspace_bytes,), dtype=torch.uint8)
            args.workspace.address = workspace.data_ptr()
        problem = native.library(platform).run(op.native, args, **_CONTEXTS[platform](first))
    if problem:
        raise ValueError(f"{op.name}: {op.user_message(problem)}")
    return results


class _Prepared(NamedTuple):
    """A resolved call, its native arguments but for the addresses, and the workspace that it needs (cuda)."""

    call: Call
    template: ctypes.Structure
    workspace_bytes: int


@functools.lru_cache(maxsize=4096)
def _prepare(op: Op, platform: str, layouts: Layouts, scalars: tuple[Any, ...]) -> _Prepared:
    call = resolve(op, layouts, scalars)
    tensors = operand_tensors(op, call, layouts)
    workspace_bytes = 0
    if platform == "cuda" and op.native is ATTENTION:
        workspace_bytes = cuda_attention.needs(call, tensors).workspace_bytes
        tensors["workspace"] = native.CTensor.of(DTYPE_CODES["uint8"], (workspace_bytes,))
    for slot, result in zip(op.native.results, call.results, strict=False):
        if slot not in tensors:
            tensors[slot] = native.CTensor.of(DTYPE_CODES[result.dtype], result.shape)
    template = native.library(platform).arguments(op.native, tensors, dict(call.attributes))
    return _Prepared(call, template, workspace_bytes)


def operand_tensors(op: Op, call: Call, layouts: Layouts) -> dict[str, native.CTensor]:
    """A call's operands by native field, without their addresses."""
    by_name = {t.name: layout for t, layout in zip(op.tensors, layouts, strict=True)}
    tensors = {}
    for name, slot in call.operands:
        layout = by_name[name]
        assert layout is not None
        tensors[slot] = native.CTensor.of(
            DTYPE_CODES[_DTYPE_NAMES[layout.dtype]], layout.shape, layout.stride
        )
    return tensors


def _dtype_name(dtype: torch.dtype) -> str:
    # An unknown dtype gets its torch name, so that the error can say what came.
    return _DTYPE_NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def _cpu_context(_: torch.Tensor) -> dict[str, int]:
    return {"num_threads": torch.get_num_threads()}


def _cuda_context(tensor: torch.Tensor) -> dict[str, int]:
    # What inductor's programs call too: the public function makes a Stream object each time.
    return {"stream": torch._C._cuda_getCurrentRawStream(tensor.get_device())}


_CONTEXTS: dict[str, Callable[[torch.Tensor], dict[str, int]]] = {"cpu": _cpu_context, "cuda": _cuda_context}


def _on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes a GPU tensor's device the current one, which is where kernels are launched."""
    if not tensor.is_cuda or tensor.get_device() == torch._C._cuda_getDevice():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.get_device())
