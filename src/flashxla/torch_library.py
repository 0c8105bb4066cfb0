"""Registers the declared operations with PyTorch as torch.ops.flashxla.<name>.

From each declaration: the schema with true mutation annotations, the fake kernel, kernels for cpu and cuda
tensors (the native library through its C ABI), for XLA tensors (a custom call, flashxla.xla.embed) and for autograd
(flashxla.torch_autograd), and for an operation that updates its arguments in place a functional variant, which
returns the results and then the updated arguments, and from which functionalization builds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.functional_tensor import (
    CppFunctionalizeAPI,
    FunctionalTensorMode,
    PythonFunctionalizeAPI,
)

from flashxla import torch_autograd, torch_calls
from flashxla.ops import OPS
from flashxla.ops.op import Call, Op
from flashxla.ops.parameters import Tensor
from flashxla.platforms import PLATFORMS
from flashxla.xla import lazy as lazy_calls
from flashxla.xla import torch_tpu

_LIBRARY = torch.library.Library("flashxla", "DEF")
_KEYS = {platform.name: platform.torch_key for platform in PLATFORMS.values()}
# A length may be a symbol of torch.compile's. Other types have the names that Python gives them.
_SCHEMA_TYPES: dict[type, str] = {int: "SymInt"}


def register_all() -> None:
    """Register every declared operation."""
    torch_autograd.define(_LIBRARY)
    for op in OPS:
        _register(op)


def _register(op: Op) -> None:
    _register_eager(op, op.name)
    kernels = {platform: _native_kernel(op, platform) for platform in _KEYS}
    _LIBRARY.impl(op.name, torch_autograd.kernel(op, kernels), "Autograd", with_keyset=True)
    if not op.updated:
        _LIBRARY.impl(op.name, _xla_kernel(op), "XLA")
        return
    _register_eager(op, f"_{op.name}")
    variant = f"{op.name}_functional"
    _LIBRARY.define(_functional_schema(op, variant))
    for platform, key in _KEYS.items():
        _LIBRARY.impl(variant, _functional_kernel(op, platform), key)
    _LIBRARY.impl(variant, _xla_kernel(op), "XLA")
    _LIBRARY.impl(variant, _torch_tpu_kernel(op, in_place=False), torch_tpu.TORCH_KEY)
    torch.library.register_fake(f"flashxla::{variant}", _functional_fake_kernel(op), lib=_LIBRARY)
    _functionalize(op)


def _register_eager(op: Op, name: str) -> None:
    """The op for cpu and cuda tensors, and its fake kernel."""
    _LIBRARY.define(_schema(op, name), tags=(torch.Tag.needs_fixed_stride_order,))
    for platform, key in _KEYS.items():
        _LIBRARY.impl(name, _native_kernel(op, platform), key)
    _LIBRARY.impl(name, _torch_tpu_kernel(op, in_place=True), torch_tpu.TORCH_KEY)
    torch.library.register_fake(f"flashxla::{name}", _fake_kernel(op), lib=_LIBRARY)


def values_of(op: Op, args: Sequence[Any]) -> torch_calls.Values:
    """A call's arguments in the declared order, with the defaults that the dispatcher leaves out."""
    return (*args, *op.defaults[len(args) :])


# Schemas


def _schema(op: Op, name: str) -> str:
    returns = ", ".join("Tensor" for _ in op.results)
    return f"{name}({', '.join(_parameters(op, mutable=True))}) -> ({returns})"


def _functional_schema(op: Op, name: str) -> str:
    returns = ["Tensor" for _ in op.results] + ["Tensor?" if t.optional else "Tensor" for t in op.updated]
    # donate: the arguments that the call updates are not needed any more.
    parameters = ", ".join(_parameters(op, mutable=False))
    return f"{name}({parameters}, *, bool donate=False) -> ({', '.join(returns)})"


def _parameters(op: Op, mutable: bool) -> list[str]:
    letters = iter("abcdefgh")
    parameters = []
    for p in op.parameters:
        if isinstance(p, Tensor):
            kind = f"Tensor({next(letters)}!)" if p.updated and mutable else "Tensor"
            parameters.append(f"{kind}? {p.name}=None" if p.optional else f"{kind} {p.name}")
            continue
        kind = _SCHEMA_TYPES.get(p.type, p.type.__name__) + ("?" if p.default is None else "")
        default = "" if p.required else f"={_literal(p.default)}"
        parameters.append(f"{kind} {p.name}{default}")
    return parameters


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


# Kernels


def _returned(results: Sequence[torch.Tensor | None]) -> Any:
    return results[0] if len(results) == 1 else tuple(results) or None


def _native_kernel(op: Op, platform: str) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        return _returned(torch_calls.run(op, platform, values_of(op, args)))

    return kernel


def _functional_kernel(op: Op, platform: str) -> Callable[..., Any]:
    updated = op.updated_positions

    def kernel(*args: Any, donate: bool = False) -> Any:
        values = list(values_of(op, args))
        for i in updated:
            values[i] = None if values[i] is None else values[i].clone()
        results = torch_calls.run(op, platform, tuple(values))
        return _returned([*results, *(values[i] for i in updated)])

    return kernel


def _fake_kernel(op: Op) -> Callable[..., Any]:
    def fake(*args: Any) -> Any:
        return _returned(_fake_results(op, values_of(op, args)))

    return fake


def _functional_fake_kernel(op: Op) -> Callable[..., Any]:
    updated = op.updated_positions

    def fake(*args: Any, donate: bool = False) -> Any:
        values = values_of(op, args)
        caches = [None if values[i] is None else torch.empty_like(values[i]) for i in updated]
        return _returned([*_fake_results(op, values), *caches])

    return fake


def _fake_results(op: Op, values: Sequence[Any]) -> list[torch.Tensor]:
    # Uncached: symbolic sizes have no hash.
    call = torch_calls.resolve(op, torch_calls.signature(op, tuple(values)))
    return torch_calls.empty_results(op, call, values[0])


def _xla_kernel(op: Op) -> Callable[..., Any]:
    """The results of an op on PyTorch/XLA's tensors, and behind them what it updates."""

    def kernel(*args: Any, donate: bool = False) -> Any:
        from flashxla.xla import embed

        values = values_of(op, args)
        call, tensors = embed.run(op, values, donate=donate)
        return _returned_by_xla(op, call, values, tensors)

    return kernel


def _torch_tpu_kernel(op: Op, in_place: bool) -> Callable[..., Any]:
    """An op on TorchTPU's tensors: its results, and what it updates, which is written back or returned behind them."""

    def kernel(*args: Any, donate: bool = False) -> Any:
        from flashxla.xla import torch_tpu_calls

        values = values_of(op, args)
        program = torch_tpu_calls.program(op, torch_calls.signature(op, values))
        tensors = program.run(values) if in_place else program.run_functional(values, donate)
        return _returned_by_xla(op, program.call, values, tensors)

    return kernel


def _returned_by_xla(op: Op, call: Call, values: torch_calls.Values, tensors: Sequence[torch.Tensor]) -> Any:
    """A call's results, empty ones for those that it does not compute, and behind them the updates that are given."""
    count = len(call.results)
    got = dict(zip([field for field, _ in call.results], tensors[:count], strict=True))
    empty = None if count == len(op.results) else values[0].new_empty((0,), dtype=torch.float32)
    results = [got.get(r.field, empty) for r in op.results]
    if len(tensors) == count:
        return _returned(results)
    updates = iter(tensors[count:])
    return _returned(
        [*results, *(None if values[i] is None else next(updates) for i in op.updated_positions)]
    )


# Functionalization


def _functionalize(op: Op) -> None:
    """Build the in-place op from its functional variant, where XLA's tensors are functionalized.

    Without this, PyTorch refuses a custom op with alias annotations in lazy mode, and copies its arguments under
    torch.compile. The variant's custom call declares the update as aliasing, so nothing is copied.

    Other devices keep PyTorch's own functionalization, which inductor knows how to make in place again. It takes
    only ops without a rule of their own, so it gets the op's double, `_<name>`.
    """
    variant = getattr(torch.ops.flashxla, f"{op.name}_functional").default
    double = getattr(torch.ops.flashxla, f"_{op.name}").default
    updated = op.updated_positions
    num_results = len(op.results)

    def lazy(*args: Any) -> Any:
        api: Any = CppFunctionalizeAPI()
        values = values_of(op, args)
        inner = [_unwrapped(value) for value in values]
        with api.redispatch_to_next():
            results = _tuple(variant(*inner))
        given = [values[i] for i in updated if values[i] is not None]
        lazy_calls.update(given, [update for update in results[num_results:] if update is not None])
        return _returned([torch._to_functional_tensor(result) for result in results[:num_results]])

    _LIBRARY.impl(op.name, lazy, "Functionalize")
    overload = getattr(torch.ops.flashxla, op.name).default

    def traced(mode: FunctionalTensorMode, *args: Any) -> Any:
        values = values_of(op, args)
        caches = [values[i] for i in updated if values[i] is not None]
        # Inductor of PyTorch 2.9 reads out of bounds when it copies a view that starts behind its storage's start,
        # which it does for a mutated argument that shares its storage: such views take the functional variant.
        if caches[0].device.type != "xla" and all(cache.storage_offset() == 0 for cache in caches):
            with mode:
                return double(*args)
        api: Any = PythonFunctionalizeAPI(mode)
        results = _tuple(variant(*api.unwrap_tensors(args), donate=True))
        new = [update for update in results[num_results:] if update is not None]
        for cache, update in zip(caches, new, strict=True):
            api.replace(cache, update)
            api.commit_update(cache)
            api.sync(cache)
        return _returned(api.wrap_tensors(results[:num_results]))

    overload.py_impl(FunctionalTensorMode)(traced)


def _unwrapped(value: Any) -> Any:
    """What a functional tensor wraps; other values stay. CppFunctionalizeAPI's way, a pytree, takes ten times this."""
    if not isinstance(value, torch.Tensor) or not torch._is_functional_tensor(value):
        return value
    return lazy_calls.unwrapped(value)


def _tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
