"""A resolved call on torch tensors: checking their arguments, and running the native library on their memory.

The counterpart of `jax_calls`. What depends on shapes, dtypes and strides alone is worked out once and kept, so
that a call that repeats costs little more than its kernel.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flashxla import cuda_attention, native
from flashxla.ops import OPS
from flashxla.ops.attention import ATTENTION
from flashxla.ops.cache_format import DTYPE_CODES
from flashxla.ops.op import Aval, Call, Op, Parameter, Scalar, type_error, value_error

_DTYPE_NAMES = {getattr(torch, name): name for name in DTYPE_CODES}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}

# The arguments of a call in the declared order, and the same with a plain tuple of Layout's fields for each tensor:
# what the call's program depends on.
Values = tuple[Any, ...]
Signature = tuple[Any, ...]


class Layout(NamedTuple):
    """A tensor without its data."""

    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...]
    device: torch.device


def signature(op: Op, values: Values) -> Signature:
    """What a call's program depends on."""
    return tuple(
        [
            (v.shape, v.dtype, v.stride(), v.device) if is_tensor and v is not None else v
            for v, is_tensor in zip(values, op.is_tensor, strict=True)
        ]
    )


def layouts(op: Op, signature: Signature) -> dict[str, Layout | None]:
    """The tensors of a call by name, without their data."""
    by_name = dict(zip(op.names, signature, strict=True))
    return {t.name: None if by_name[t.name] is None else Layout(*by_name[t.name]) for t in op.tensors}


def aval(layout: Layout) -> Aval:
    """Shape and dtype of a tensor, in the declarations' terms."""
    return Aval(tuple(layout.shape), _dtype_name(layout.dtype))


def _exact_types(parameter: Parameter) -> tuple[type, ...]:
    if isinstance(parameter, Scalar):
        exact, may_be_none = parameter.type, parameter.default is None
    else:
        exact, may_be_none = torch.Tensor, parameter.optional
    return (exact, type(None)) if may_be_none else (exact,)


# By op, for each argument the types that need no second look.
_EXACT_TYPES = {op.name: tuple(map(_exact_types, op.parameters)) for op in OPS}


def checked(op: Op, args: Values) -> Values:
    """The arguments of a call, in order: tensors where tensors are taken, scalars of the declared types.

    Raises TypeError.
    """
    odd = [
        i
        for i, (arg, types) in enumerate(zip(args, _EXACT_TYPES[op.name], strict=True))
        if type(arg) not in types
    ]
    if not odd:
        return args
    values = list(args)
    for i in odd:
        parameter, value = op.parameters[i], args[i]
        if isinstance(parameter, Scalar):
            values[i] = parameter.convert(op.function, value)
        elif not isinstance(value, torch.Tensor):
            got = "None" if value is None else f"{value!r} ({type(value).__name__})"
            label = op.label(parameter.name, lambda name: args[op.names.index(name)] is not None)
            raise type_error(op.function, label, got, f"a tensor of {', '.join(parameter.dtypes)}")
    return tuple(values)


def resolve(op: Op, signature: Signature) -> Call:
    """Hold a call against the declaration. Raises TypeError and ValueError."""
    given = {name: layout for name, layout in layouts(op, signature).items() if layout}
    first = op.tensors[0].name
    for name, layout in given.items():
        if first in given and layout.device != given[first].device:
            raise value_error(
                op.function,
                op.label(name, given.__contains__),
                f"a tensor on {layout.device}",
                f"{given[first].device}, the device of {first}",
            )
    avals = {t.name: aval(given[t.name]) if t.name in given else None for t in op.tensors}
    by_name = dict(zip(op.names, signature, strict=True))
    return op.resolve(avals, {s.name: by_name[s.name] for s in op.scalars})


def empty_results(op: Op, call: Call, like: torch.Tensor) -> list[torch.Tensor]:
    """Tensors for the op's results; one that the call does not compute is empty."""
    results = [like.new_empty(r.shape, dtype=_DTYPES[r.dtype]) for r in call.results]
    missing = len(op.result_names) - len(results)
    return results + [like.new_empty((0,), dtype=torch.float32) for _ in range(missing)]


def run(op: Op, platform: str, values: Values) -> list[torch.Tensor]:
    """Run an operation on tensors in the memory of `platform`; returns its results."""
    first = values[0]
    if first.is_cuda and first.get_device() != torch._C._cuda_getDevice():
        # Kernels are launched on the current device.
        with torch.cuda.device(first.get_device()):
            return run(op, platform, values)
    prepared = _prepare(op, platform, signature(op, values))
    results = [] if op.mutated else empty_results(op, prepared.call, first)
    args = type(prepared.template).from_buffer_copy(prepared.template)
    for i, slot in prepared.operands:
        getattr(args, slot).address = values[i].data_ptr()
    for slot, result in zip(op.native.results[: len(prepared.call.results)], results, strict=False):
        getattr(args, slot).address = result.data_ptr()
    if prepared.workspace_bytes:
        # Free again as soon as the call is made: who gets it next uses it after this, on the same stream.
        workspace = first.new_empty((prepared.workspace_bytes,), dtype=torch.uint8)
        args.workspace.address = workspace.data_ptr()
    problem = native.library(platform).run(op.native, args, **_CONTEXTS[platform](first))
    if problem:
        raise ValueError(prepared.call.user_message(problem))
    if prepared.updated:
        mark_updated([values[i] for i in prepared.updated])
    return results


def mark_updated(tensors: list[torch.Tensor]) -> None:
    """Let autograd see that tensors were updated in place: it refuses gradients that need their old values."""
    if not any([tensor.is_inference() for tensor in tensors]):
        torch.autograd.graph.increment_version(tensors)


class _Prepared(NamedTuple):
    """A resolved call, its native arguments but for the addresses, and the workspace that it needs (cuda).

    operands: (position among the arguments, native field); updated: positions of those that it updates in place.
    """

    call: Call
    operands: tuple[tuple[int, str], ...]
    updated: tuple[int, ...]
    template: ctypes.Structure
    workspace_bytes: int


@functools.lru_cache(maxsize=4096)
def _prepare(op: Op, platform: str, signature: Signature) -> _Prepared:
    call = resolve(op, signature)
    tensors = operand_tensors(op, call, signature)
    workspace_bytes = 0
    if platform == "cuda" and op.native is ATTENTION:
        workspace_bytes = cuda_attention.needs(call, tensors).workspace_bytes
        tensors["workspace"] = native.CTensor.of(DTYPE_CODES["uint8"], (workspace_bytes,))
    for slot, result in zip(op.native.results, call.results, strict=False):
        if slot not in tensors:
            tensors[slot] = native.CTensor.of(DTYPE_CODES[result.dtype], result.shape)
    template = native.library(platform).arguments(op.native, tensors, dict(call.attributes))
    operands = tuple((op.names.index(name), slot) for name, slot in call.operands)
    updated = tuple(op.names.index(t.name) for t in op.mutated)
    return _Prepared(call, operands, updated, template, workspace_bytes)


def operand_tensors(op: Op, call: Call, signature: Signature) -> dict[str, native.CTensor]:
    """A call's operands by native field, without their addresses."""
    by_name = layouts(op, signature)
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
