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

from flashxla import torch_calls
from flashxla.ops import OPS, Op, Tensor

_LIBRARY = torch.library.Library("flashxla", "DEF")


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
    _LIBRARY.impl(twin, _functional_kernel(op, "cpu"), "CPU")
    _LIBRARY.impl(twin, _functional_kernel(op, "cuda"), "CUDA")
    _LIBRARY.impl(twin, _xla_kernel(op), "XLA")
    torch.library.register_fake(f"flashxla::{twin}", _functional_fake_kernel(op), lib=_LIBRARY)
    _functionalize(op)


def _register_eager(op: Op, name: str) -> None:
    """The op for cpu and cuda tensors, and its fake kernel."""
    _LIBRARY.define(_schema(op, name), tags=(torch.Tag.needs_fixed_stride_order,))
    _LIBRARY.impl(name, _native_kernel(op, "cpu"), "CPU")
    _LIBRARY.impl(name, _native_kernel(op, "cuda"), "CUDA")
    torch.library.register_fake(f"flashxla::{name}", _fake_kernel(op), lib=_LIBRARY)


def bind(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments by name, with the defaults that the dispatcher leaves out."""
    bound = dict(zip(op.names, (*args, *op.defaults[len(args) :]), strict=True))
    bound.update(kwargs)
    return bound


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


def _returned(results: Sequence[torch.Tensor]) -> Any:
    return results[0] if len(results) == 1 else tuple(results) or None


def _native_kernel(op: Op, platform: str) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return _returned(torch_calls.run(op, platform, bind(op, args, kwargs)))

    return kernel


def _functional_kernel(op: Op, platform: str) -> Callable[..., Any]:
    def kernel(*args: Any, donate: bool = False, **kwargs: Any) -> Any:
        arguments = bind(op, args, kwargs)
        updates = {t.name: arguments[t.name].clone() for t in op.mutated}
        torch_calls.run(op, platform, {**arguments, **updates})
        return _returned(list(updates.values()))

    return kernel


def _fake_kernel(op: Op) -> Callable[..., Any]:
    def fake(*args: Any, **kwargs: Any) -> Any:
        arguments = bind(op, args, kwargs)
        # Uncached: symbolic sizes have no hash.
        call = torch_calls.resolve(op, *torch_calls.layouts_and_scalars(op, arguments))
        first = arguments[op.tensors[0].name]
        return None if op.mutated else _returned(torch_calls.empty_results(op, call, first))

    return fake


def _functional_fake_kernel(op: Op) -> Callable[..., Any]:
    def fake(*args: Any, **kwargs: Any) -> Any:
        arguments = bind(op, args, kwargs)
        torch_calls.resolve(op, *torch_calls.layouts_and_scalars(op, arguments))
        return _returned([torch.empty_like(arguments[t.name]) for t in op.mutated])

    return fake


def _xla_kernel(op: Op) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        from flashxla.xla import embed

        arguments = bind(op, args, kwargs)
        results = embed.run(op, arguments, donate=arguments.get("donate", False))
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
        arguments = bind(op, args, kwargs)
        inner = {name: _unwrapped(value) for name, value in arguments.items()}
        with api.redispatch_to_next():
            new = _tuple(twin(*(inner[name] for name in op.names)))
            for tensor, update in zip(op.mutated, new, strict=True):
                # Tells torch_xla that the update takes the old value's place, which lets it donate the buffer.
                torch.ops.aten._propagate_xla_data(inner[tensor.name], update)
        for tensor, update in zip(op.mutated, new, strict=True):
            api.replace(arguments[tensor.name], update)
            api.commit_update(arguments[tensor.name])
            api.sync(arguments[tensor.name])

    _LIBRARY.impl(op.name, lazy, "Functionalize")
    overload = getattr(torch.ops.flashxla, op.name).default

    def traced(mode: FunctionalTensorMode, *args: Any, **kwargs: Any) -> None:
        arguments = bind(op, args, kwargs)
        caches = [arguments[t.name] for t in op.mutated]
        # Inductor of PyTorch 2.9 reads out of bounds when it copies a view that starts behind its storage's start,
        # which it does for a mutated argument that shares its storage: such views take the twin.
        if caches[0].device.type != "xla" and all(cache.storage_offset() == 0 for cache in caches):
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


def _unwrapped(value: Any) -> Any:
    """What a functional tensor wraps; other values stay. CppFunctionalizeAPI's way, a pytree, takes ten times this."""
    if not isinstance(value, torch.Tensor) or not torch._is_functional_tensor(value):
        return value
    torch._sync(value)  # type: ignore[no-untyped-call]
    return torch._from_functional_tensor(value)


def _tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
