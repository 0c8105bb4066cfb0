"""Registers the declared operations with PyTorch as torch.ops.flashxla.<name>.

From each declaration: the schema with true mutation annotations, the fake kernel, kernels for cpu and cuda
tensors (the native library through its C ABI) and for XLA tensors (a custom call, flashxla.xla.embed), and for
an operation that updates its arguments in place a functional twin, from which functionalization builds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.functional_tensor import (
    CppFunctionalizeAPI,
    FunctionalTensorMode,
    PythonFunctionalizeAPI,
)

from flashxla import native
from flashxla.ops import OPS, Aval, Call, Op, Tensor
from flashxla.ops.cache_format import DTYPE_CODES

_LIBRARY = torch.library.Library("flashxla", "DEF")
_DTYPE_NAMES = {getattr(torch, name): name for name in DTYPE_CODES}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}

Arguments = dict[str, Any]


def register_all() -> None:
    """Register every declared operation."""
    for op in OPS:
        _register(op)


def _register(op: Op) -> None:
    _register_eager(op, op.name)
    if not op.mutated:
        _LIBRARY.impl(op.name, _xla_kernel(op), "XLA")
        return
    _register_eager(op, f"_{op.name}")
    twin = f"{op.name}_functional"
    _LIBRARY.define(_functional_schema(op, twin))
    _LIBRARY.impl(twin, _xla_kernel(op), "XLA")
    torch.library.register_fake(f"flashxla::{twin}", _functional_fake_kernel(op), lib=_LIBRARY)
    _functionalize(op)


def _register_eager(op: Op, name: str) -> None:
    """The op for cpu and cuda tensors, and its fake kernel."""
    _LIBRARY.define(_schema(op, name), tags=(torch.Tag.needs_fixed_stride_order,))
    _LIBRARY.impl(name, _native_kernel(op, "cpu"), "CPU")
    _LIBRARY.impl(name, _native_kernel(op, "cuda"), "CUDA")
    torch.library.register_fake(f"flashxla::{name}", _fake_kernel(op), lib=_LIBRARY)


def bind(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """A call's arguments by name, with the defaults that the dispatcher leaves out."""
    bound = dict(zip((p.name for p in op.parameters), args, strict=False))
    bound.update(kwargs)
    for p in op.parameters:
        if p.name not in bound:
            bound[p.name] = None if isinstance(p, Tensor) else p.default
    return bound


def resolve(op: Op, arguments: Arguments) -> Call:
    """Hold a call's torch arguments against the declaration."""
    device = arguments[op.tensors[0].name].device
    for t in op.tensors:
        if arguments[t.name] is not None and arguments[t.name].device != device:
            raise ValueError(
                f"{op.name}: {t.name}: got a tensor on {arguments[t.name].device}; accepted: {device}, the device of "
                f"{op.tensors[0].name}"
            )
    avals = {t.name: _aval(arguments[t.name]) for t in op.tensors}
    return op.resolve(avals, {s.name: arguments[s.name] for s in op.scalars})


def _aval(tensor: torch.Tensor | None) -> Aval | None:
    if tensor is None:
        return None
    # An unknown dtype gets its torch name, so that the error can say what came.
    return Aval(
        tuple(tensor.shape), _DTYPE_NAMES.get(tensor.dtype) or str(tensor.dtype).removeprefix("torch.")
    )


# Schemas


def _schema(op: Op, name: str) -> str:
    returns = ", ".join("Tensor" for _ in op.result_names)
    return f"{name}({', '.join(_parameters(op, mutable=True))}) -> ({returns})"


def _functional_schema(op: Op, name: str) -> str:
    returns = ", ".join("Tensor" for _ in op.mutated)
    # donate: the arguments that the call updates are not needed any more.
    return f"{name}({', '.join(_parameters(op, mutable=False))}, *, bool donate=False) -> ({returns})"


def _parameters(op: Op, mutable: bool) -> list[str]:
    letters = iter("abcdefgh")
    parameters = []
    for p in op.parameters:
        if isinstance(p, Tensor):
            kind = f"Tensor({next(letters)}!)" if p.mutated and mutable else "Tensor"
            parameters.append(f"{kind}? {p.name}=None" if p.optional else f"{kind} {p.name}")
            continue
        kind = p.type.__name__ + ("?" if p.default is None else "")
        default = "" if p.required else f"={_literal(p.default)}"
        parameters.append(f"{kind} {p.name}{default}")
    return parameters


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


# Kernels


def _results(op: Op, call: Call, like: torch.Tensor) -> list[torch.Tensor]:
    results = [like.new_empty(r.shape, dtype=_DTYPES[r.dtype]) for r in call.results]
    # A result that was not asked for is an empty tensor.
    missing = len(op.result_names) - len(results)
    return results + [like.new_empty((0,), dtype=torch.float32) for _ in range(missing)]


def _returned(results: Sequence[torch.Tensor]) -> Any:
    return results[0] if len(results) == 1 else tuple(results)


def _native_kernel(op: Op, platform: str) -> Callable[..., Any]:
    context = _cpu_context if platform == "cpu" else _cuda_context

    def kernel(*args: Any, **kwargs: Any) -> Any:
        arguments = bind(op, args, kwargs)
        call = resolve(op, arguments)
        first = arguments[op.tensors[0].name]
        fields = {}
        for name, slot in call.operands:
            fields[slot] = _ctensor(arguments[name])
        results = [] if op.mutated else _results(op, call, first)
        for slot, result in zip(op.native.results[: len(call.results)], results, strict=False):
            fields[slot] = _ctensor(result)
        problem = native.library(platform).call(op.native, fields, dict(call.attributes), **context(first))
        if problem:
            raise ValueError(f"{op.name}: {op.user_message(problem)}")
        return _returned(results) if results else None

    return kernel


def _ctensor(tensor: torch.Tensor) -> native.CTensor:
    c = native.CTensor()
    c.set(tensor.data_ptr(), DTYPE_CODES[_DTYPE_NAMES[tensor.dtype]], tensor.shape, tensor.stride())
    return c


def _cpu_context(_: torch.Tensor) -> dict[str, int]:
    return {"num_threads": torch.get_num_threads()}


def _cuda_context(tensor: torch.Tensor) -> dict[str, int]:
    return {"stream": torch.cuda.current_stream(tensor.device).cuda_stream}


def _fake_kernel(op: Op) -> Callable[..., Any]:
    def fake(*args: Any, **kwargs: Any) -> Any:
        arguments = bind(op, args, kwargs)
        call = resolve(op, arguments)
        return None if op.mutated else _returned(_results(op, call, arguments[op.tensors[0].name]))

    return fake


def _functional_fake_kernel(op: Op) -> Callable[..., Any]:
    def fake(*args: Any, **kwargs: Any) -> Any:
        arguments = bind(op, args, kwargs)
        resolve(op, arguments)
        return _returned([torch.empty_like(arguments[t.name]) for t in op.mutated])

    return fake


def _xla_kernel(op: Op) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        from flashxla.xla import embed

        arguments = bind(op, args, kwargs)
        call = resolve(op, arguments)
        operands = [arguments[name] for name, _ in call.operands]
        results = embed.run(call, operands, donate=arguments.get("donate", False))
        missing = max(0, len(op.result_names) - len(results))
        first = arguments[op.tensors[0].name]
        return _returned(results + [first.new_empty((0,), dtype=torch.float32) for _ in range(missing)])

    return kernel


# Functionalization


def _functionalize(op: Op) -> None:
    """Build the in-place op from its functional twin, where XLA's tensors are functionalized.

    Without this, PyTorch refuses a custom op with alias annotations in lazy mode, and copies its arguments under
    torch.compile. The twin's custom call declares the update as aliasing, so nothing is copied.

    Other devices keep PyTorch's own functionalization, which inductor knows how to make in place again. It takes
    only ops without a rule of their own, so it gets the op's double, `_<name>`.
    """
    twin = getattr(torch.ops.flashxla, f"{op.name}_functional").default
    double = getattr(torch.ops.flashxla, f"_{op.name}").default

    def lazy(*args: Any, **kwargs: Any) -> None:
        api: Any = CppFunctionalizeAPI()
        inner = bind(op, api.unwrap_tensors(args), api.unwrap_tensors(kwargs))
        with api.redispatch_to_next():
            new = _tuple(twin(*(inner[p.name] for p in op.parameters)))
            for tensor, update in zip(op.mutated, new, strict=True):
                # Tells torch_xla that the update takes the old value's place, which lets it donate the buffer.
                torch.ops.aten._propagate_xla_data(inner[tensor.name], update)
        arguments = bind(op, args, kwargs)
        for tensor, update in zip(op.mutated, new, strict=True):
            api.replace(arguments[tensor.name], update)
            api.commit_update(arguments[tensor.name])
            api.sync(arguments[tensor.name])

    _LIBRARY.impl(op.name, lazy, "Functionalize")
    overload = getattr(torch.ops.flashxla, op.name).default

    def traced(mode: FunctionalTensorMode, *args: Any, **kwargs: Any) -> None:
        arguments = bind(op, args, kwargs)
        if arguments[op.mutated[0].name].device.type != "xla":
            with mode:
                return double(*args, **kwargs)
        api: Any = PythonFunctionalizeAPI(mode)
        new = _tuple(twin(*api.unwrap_tensors(args), **api.unwrap_tensors(kwargs), donate=True))
        for tensor, update in zip(op.mutated, new, strict=True):
            api.replace(arguments[tensor.name], update)
            api.commit_update(arguments[tensor.name])
            api.sync(arguments[tensor.name])
        return None

    overload.py_impl(FunctionalTensorMode)(traced)


def _tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
