"""A resolved call on torch tensors: checking their arguments, and running the native library on their memory.

The counterpart of `jax_calls`. What depends on shapes, dtypes and strides alone is worked out once and kept, so
that a call that repeats costs little more than its kernel.
"""

from __future__ import annotations

import ctypes
import functools
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flashxla import native, native_calls
from flashxla.native import Spec
from flashxla.ops import OPS
from flashxla.ops.messages import type_error, value_error
from flashxla.ops.op import Aval, Call, Op
from flashxla.ops.parameters import FLOATS, FP8, Parameter, Scalar

_DTYPE_NAMES = {getattr(torch, name): name for name in (*FLOATS, *FP8, "uint8", "int32", "int64")}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}

# The arguments of a call in the declared order, and the same with a plain tuple of TensorMeta's fields for each tensor:
# what the call's program depends on.
Values = tuple[Any, ...]
Signature = tuple[Any, ...]


class TensorMeta(NamedTuple):
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


def tensor_metas(op: Op, signature: Signature) -> dict[str, TensorMeta | None]:
    """The tensors of a call by name, without their data."""
    by_name = dict(zip(op.names, signature, strict=True))
    return {t.name: None if by_name[t.name] is None else TensorMeta(*by_name[t.name]) for t in op.tensors}


def aval(meta: TensorMeta) -> Aval:
    """Shape and dtype of a tensor, in the declarations' terms."""
    return Aval(tuple(meta.shape), _dtype_name(meta.dtype))


def _exact_types(parameter: Parameter) -> tuple[type, ...]:
    if isinstance(parameter, Scalar):
        exact, may_be_none = parameter.type, parameter.default is None
    else:
        exact, may_be_none = torch.Tensor, parameter.optional
    return (exact, type(None)) if may_be_none else (exact,)


# By op, for each argument the types that need no second look.
_EXACT_TYPES = {op.name: tuple(map(_exact_types, op.parameters)) for op in OPS}
# By op, the types of whole calls that have had their look.
_SEEN_TYPES: dict[str, set[tuple[type, ...]]] = {op.name: set() for op in OPS}


def checked(op: Op, args: Values) -> Values:
    """The arguments of a call, in order: tensors where tensors are taken, scalars of the declared types.

    Raises TypeError.
    """
    if torch.compiler.is_compiling():
        return _looked_at(op, args)
    types = tuple(map(type, args))
    if types in (seen := _SEEN_TYPES[op.name]):
        return args
    values = _looked_at(op, args)
    if values is args:
        seen.add(types)
    return values


def _looked_at(op: Op, args: Values) -> Values:
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
        elif parameter.number and isinstance(value, numbers.Real) and isinstance(args[0], torch.Tensor):
            values[i] = torch.full((1,), float(value), dtype=torch.float32, device=args[0].device)
        elif not isinstance(value, torch.Tensor):
            got = "None" if value is None else f"{value!r} ({type(value).__name__})"
            label = op.label(parameter.name, lambda name: args[op.names.index(name)] is not None)
            raise type_error(op.function, label, got, f"a tensor of {', '.join(parameter.dtypes)}")
    return tuple(values)


def resolve(op: Op, signature: Signature) -> Call:
    """Hold a call against the declaration. Raises TypeError and ValueError."""
    given = {name: meta for name, meta in tensor_metas(op, signature).items() if meta}
    first = op.tensors[0].name
    for name, meta in given.items():
        if first in given and meta.device != given[first].device:
            raise value_error(
                op.function,
                op.label(name, given.__contains__),
                f"a tensor on {meta.device}",
                f"{given[first].device}, the device of {first}",
            )
    avals = {t.name: aval(given[t.name]) if t.name in given else None for t in op.tensors}
    by_name = dict(zip(op.names, signature, strict=True))
    return op.resolve(avals, {s.name: by_name[s.name] for s in op.scalars})


def empty_results(op: Op, call: Call, like: torch.Tensor) -> list[torch.Tensor]:
    """Tensors for the op's results; one that the call does not compute is empty."""
    computed = dict(call.results)
    return [
        like.new_empty(computed[r.field].shape, dtype=_DTYPES[computed[r.field].dtype])
        if r.field in computed
        else like.new_empty((0,), dtype=torch.float32)
        for r in op.results
    ]


def run(op: Op, platform: str, values: Values) -> list[torch.Tensor]:
    """Run an operation on tensors in the memory of `platform`; returns its results."""
    first = values[0]
    if first.is_cuda and first.get_device() != torch._C._cuda_getDevice():
        # Kernels are launched on the current device.
        with torch.cuda.device(first.get_device()):
            return run(op, platform, values)
    prepared = _prepare(op, platform, signature(op, values))
    results = empty_results(op, prepared.call, first) if op.results else []
    args = type(prepared.template).from_buffer_copy(prepared.template)
    for i, field in prepared.operands:
        getattr(args, field).data = values[i].data_ptr() or native.SOME_ADDRESS
    for i, field in prepared.results:
        getattr(args, field).data = results[i].data_ptr() or native.SOME_ADDRESS
    if prepared.workspace_bytes:
        # Free again as soon as the call is made: who gets it next uses it after this, on the same stream.
        workspace = first.new_empty((prepared.workspace_bytes,), dtype=torch.uint8)
        getattr(args, prepared.workspace).data = workspace.data_ptr()
    problem = native.library(platform).run(op.native, args, **_CONTEXTS[platform](first))
    if problem:
        raise ValueError(prepared.call.user_message(problem))
    if prepared.updated:
        mark_updated([values[i] for i in prepared.updated])
    return results


def mark_updated(tensors: list[torch.Tensor]) -> None:
    """Let autograd see that tensors were updated in place: it refuses gradients that need their old values."""
    if not any([tensor.is_inference() for tensor in tensors]):
        torch._C._increment_version(tensors)


class _Prepared(NamedTuple):
    """A resolved call, its native arguments but for the addresses, and the workspace that it needs.

    operands, results: (position among the arguments or results, native field). updated: the positions of arguments
    that it updates in place. workspace: its field.
    """

    call: Call
    operands: tuple[tuple[int, str], ...]
    results: tuple[tuple[int, str], ...]
    updated: tuple[int, ...]
    template: ctypes.Structure
    workspace: str
    workspace_bytes: int


@functools.lru_cache(maxsize=4096)
def _prepare(op: Op, platform: str, signature: Signature) -> _Prepared:
    call = resolve(op, signature)
    operands = operand_specs(op, call, signature)
    size = native_calls.needs(call, platform, operands).workspace_bytes
    tensors = native_calls.tensors(call, operands)
    library = native.library(platform)
    workspace = ""
    if size:
        (workspace,) = library.operation(op.native).of_kind("workspace")
        tensors[workspace] = Spec(native_calls.WORKSPACE_DTYPE, (size,))
    fields = [r.field for r in op.results]
    return _Prepared(
        call,
        operands=tuple((op.names.index(name), field) for name, field in call.operands),
        results=tuple((fields.index(field), field) for field, _ in call.results),
        updated=tuple(op.names.index(call.operands[i][0]) for i in call.updates),
        template=library.arguments(op.native, tensors, dict(call.attributes)),
        workspace=workspace,
        workspace_bytes=size,
    )


def operand_specs(op: Op, call: Call, signature: Signature) -> dict[str, Spec]:
    """A call's operands by native field."""
    by_name = tensor_metas(op, signature)
    specs = {}
    for name, field in call.operands:
        meta = by_name[name]
        assert meta is not None
        specs[field] = Spec(_DTYPE_NAMES[meta.dtype], tuple(meta.shape), meta.stride)
    return specs


def _dtype_name(dtype: torch.dtype) -> str:
    # An unknown dtype gets its torch name, so that the error can say what came.
    return _DTYPE_NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def _cpu_context(_: torch.Tensor) -> dict[str, int]:
    return {"num_threads": torch.get_num_threads()}


def _cuda_context(tensor: torch.Tensor) -> dict[str, int]:
    # What inductor's programs call too: the public function makes a Stream object each time.
    return {"stream": torch._C._cuda_getCurrentRawStream(tensor.get_device())}


_CONTEXTS: dict[str, Callable[[torch.Tensor], dict[str, int]]] = {"cpu": _cpu_context, "cuda": _cuda_context}
