"""A resolved call on torch tensors: checking their arguments, and running the native library on their memory.

The counterpart of `jax_calls`. What depends on shapes, dtypes and strides alone is worked out once and kept, so
that a call that repeats costs little more than its kernel.
"""

from __future__ import annotations

import ctypes
import functools
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from flashxla import native, native_calls
from flashxla.native import Spec
from flashxla.ops import OPS
from flashxla.ops.messages import type_error, value_error
from flashxla.ops.op import Aval, Call, Op
from flashxla.ops.parameters import FLOATS, FP8, Parameter, Scalar

try:
    from torch._C._dynamo import guards as _guards

    _guards._empty_strided_cpu((1,), (1,), torch.uint8)  # type: ignore[attr-defined]
except Exception:  # not a public part of PyTorch
    _guards = None  # type: ignore[assignment]

_DTYPE_NAMES = {getattr(torch, name): name for name in (*FLOATS, *FP8, "uint8", "int32", "int64")}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}

# The arguments of a call in the declared order, and the same with a plain tuple of TensorMeta's fields for each tensor:
# what the call's program depends on.
Values = tuple[Any, ...]
Signature = tuple[Any, ...]
Found = TypeVar("Found")

# The types of tensors that have no way of their own, and what a short way returns for a call that cannot take it.
PLAIN: set[type] = {torch.Tensor, torch.nn.Parameter}
LONG_WAY = object()
# Short ways of types of tensors that are not plain, called with an op and its arguments.
OTHER_WAYS: dict[type, Callable[[Op, Values], Any]] = {}


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


def getter(positions: Sequence[int]) -> Callable[[Values], tuple[Any, ...]]:
    """A function that picks those of a call's arguments."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda values: tuple(values[i] for i in positions)


def tensor_metas(op: Op, signature: Signature) -> dict[str, TensorMeta | None]:
    """The tensors of a call by name, without their data."""
    by_name = dict(zip(op.names, signature, strict=True))
    return {t.name: None if by_name[t.name] is None else TensorMeta(*by_name[t.name]) for t in op.tensors}


def aval(meta: TensorMeta) -> Aval:
    """Shape and dtype of a tensor, in the declarations' terms."""
    return Aval(tuple(meta.shape), _dtype_name(meta.dtype))


def _exact_types(parameter: Parameter) -> tuple[type, ...]:
    if isinstance(parameter, Scalar):
        exact, may_be_none = {parameter.type}, parameter.default is None
    else:
        exact, may_be_none = PLAIN, parameter.optional
    return (*exact, type(None)) if may_be_none else tuple(exact)


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
    if (first := op.tensors[0].name) in given:
        check_devices(op.function, first, given, lambda name: op.label(name, given.__contains__))
    avals = {t.name: aval(given[t.name]) if t.name in given else None for t in op.tensors}
    by_name = dict(zip(op.names, signature, strict=True))
    return op.resolve(avals, {s.name: by_name[s.name] for s in op.scalars})


def check_devices(
    function: str, first: str, given: Mapping[str, Any], label: Callable[[str], str] = str
) -> None:
    """Hold the devices of tensors, or of their metas, against that of the first. Raises ValueError."""
    device = given[first].device
    for name, x in given.items():
        if x.device != device:
            raise value_error(
                function, label(name), f"a tensor on {x.device}", f"{device}, the device of {first}"
            )


def kept(function: Callable[[Op, Signature], Found]) -> Callable[[Op, Values], Found]:
    """function(op, signature) of a call's arguments, found out once for each signature of plain tensors.

    Other types may have symbols for sizes, which have no hash.
    """
    once = functools.lru_cache(maxsize=4096)(function)

    def of_call(op: Op, values: Values) -> Found:
        return (once if type(values[0]) in PLAIN else function)(op, signature(op, values))

    return of_call


_resolve_once = kept(resolve)


def check(op: Op, args: Values) -> None:
    """Raise what a call would raise about its arguments. Raises TypeError and ValueError."""
    _resolve_once(op, checked(op, args))


def empty_results(op: Op, call: Call, like: torch.Tensor) -> list[torch.Tensor]:
    """Tensors for the op's results; one that the call does not compute is empty."""
    computed = dict(call.results)
    return [
        like.new_empty(computed[r.field].shape, dtype=_DTYPES[computed[r.field].dtype])
        if r.field in computed
        else _not_computed(like)
        for r in op.results
    ]


def _not_computed(like: torch.Tensor) -> torch.Tensor:
    """What stands for a result that a call does not compute."""
    return like.new_empty((0,), dtype=torch.float32)


def run(op: Op, platform: str, values: Values) -> list[torch.Tensor]:
    """Run an operation on tensors in the memory of `platform`; returns its results."""
    first = values[0]
    if first.is_cuda and first.get_device() != torch._C._cuda_getDevice():
        # Kernels are launched on the current device.
        with torch.cuda.device(first.get_device()):
            return run(op, platform, values)
    prepared = prepare(op, platform, signature(op, values))
    computed = dict(zip(prepared.results, prepared.run(values), strict=True))
    if prepared.updated:
        mark_updated([values[i] for i in prepared.updated])
    return [computed[i] if i in computed else _not_computed(first) for i in range(len(op.results))]


def mark_updated(tensors: list[torch.Tensor]) -> None:
    """Let autograd see that tensors were updated in place: it refuses gradients that need their old values."""
    if not any([tensor.is_inference() for tensor in tensors]):
        torch._C._increment_version(tensors)


class Prepared:
    """A resolved call, ready to run on tensors.

    updated: the positions of the arguments that it updates in place. results: those of the results that it computes.
    """

    def __init__(self, op: Op, platform: str, call: Call, operands: dict[str, Spec]) -> None:
        fields = [r.field for r in op.results]
        self.call = call
        self.updated = tuple(op.names.index(call.operands[i][0]) for i in call.updates)
        self.results = tuple(fields.index(field) for field, _ in call.results)
        self._results = [_dense(aval.shape, _DTYPES[aval.dtype]) for _, aval in call.results]
        self._operands = getter([op.names.index(name) for name, _ in call.operands])
        workspace_bytes = native_calls.needs(call, platform, operands).workspace_bytes
        self._workspace = _dense((workspace_bytes,), torch.uint8) if workspace_bytes else None
        self._empty = _EMPTY[platform]
        library = native.library(platform)
        tensors = native_calls.tensors(call, operands)
        given = [field for _, field in call.operands] + [field for field, _ in call.results]
        if workspace_bytes:
            (workspace,) = library.operation(op.native).of_kind("workspace")
            tensors[workspace] = Spec(native_calls.WORKSPACE_DTYPE, (workspace_bytes,))
            given.append(workspace)
        args = library.arguments(op.native, tensors, dict(call.attributes))
        context, self._context_of, fixed = _CONTEXTS[platform]
        self._run = library.bound(op.native, args, given, context, **fixed())

    def run(self, values: Values) -> list[torch.Tensor]:
        """Run the call; returns the results that it computes. Raises ValueError."""
        first = values[0]
        results = [self._empty(*result) for result in self._results]
        tensors = [*self._operands(values), *results]
        if self._workspace:
            # Free again as soon as the call is made: who gets it next uses it after this, on the same stream.
            tensors.append(self._empty(*self._workspace))
        addresses = [tensor.data_ptr() or native.SOME_ADDRESS for tensor in tensors]
        if problem := self._run(addresses, self._context_of(first)):
            raise ValueError(self.call.user_message(problem))
        return results


@functools.lru_cache(maxsize=4096)
def prepare(op: Op, platform: str, signature: Signature) -> Prepared:
    """A call on a platform's tensors. Raises TypeError and ValueError."""
    call = resolve(op, signature)
    _check_updated(op, call, signature)
    return Prepared(op, platform, call, operand_specs(op, call, signature))


def _check_updated(op: Op, call: Call, signature: Signature) -> None:
    """Refuse to update a tensor whose elements share memory, as PyTorch's own operations do. Raises ValueError."""
    by_name = tensor_metas(op, signature)
    for i in call.updates:
        name = call.operands[i][0]
        meta = by_name[name]
        assert meta is not None
        has_elements = 0 not in meta.shape
        if has_elements and any(
            size > 1 and step == 0 for size, step in zip(meta.shape, meta.stride, strict=True)
        ):
            label = op.label(name, lambda other: by_name[other] is not None)
            got = f"an expanded tensor of strides {list(meta.stride)}"
            raise value_error(op.function, label, got, "a tensor whose elements have memory of their own")


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


def _cpu_context(_: torch.Tensor) -> int:
    return torch.get_num_threads()


@functools.cache
def _cpu_threads() -> dict[str, int]:
    """The fields of flashxla_context that stay, on a CPU: the threads are those of PyTorch's own operations.

    Theirs keep their processors busy for a while after each operation, so others would have to share these with them.
    """
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return {}
    try:
        # As PyTorch finds it: the first one in the process.
        gomp_parallel = ctypes.CDLL(None).GOMP_parallel
    except AttributeError:
        return {}
    address = ctypes.cast(gomp_parallel, ctypes.c_void_p).value
    return native.library("cpu").on_openmp(address) if address else {}


def _cuda_context(tensor: torch.Tensor) -> int:
    # What inductor's programs call too: the public function makes a Stream object each time.
    return torch._C._cuda_getCurrentRawStream(tensor.get_device())


# By platform, the field of flashxla_context that says where a call runs, its value, and the fields that stay.
_CONTEXTS: dict[str, tuple[str, Callable[[torch.Tensor], int], Callable[[], dict[str, int]]]] = {
    "cpu": ("num_threads", _cpu_context, _cpu_threads),
    "cuda": ("stream", _cuda_context, dict),
}

_Empty = Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]


def _empty_on(device: str) -> _Empty:
    """A function of shape, strides and dtype: a tensor without contents on the current device of a type."""
    # What inductor's programs call, too: torch.empty, through the dispatcher, takes twice as long or more.
    short: _Empty | None = getattr(_guards, f"_empty_strided_{device}", None)
    return short or (
        lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype, device=device)
    )


# By platform.
_EMPTY = {platform: _empty_on(platform) for platform in _CONTEXTS}


def _dense(shape: Sequence[int], dtype: torch.dtype) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """What a row-major tensor is made from."""
    return tuple(shape), torch.empty(shape, device="meta").stride(), dtype
