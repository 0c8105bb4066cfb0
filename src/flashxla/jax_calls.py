"""A resolved call as a JAX computation, for each platform, and its derivative.

A call is one custom call with its updates declared as aliases. Where its operation has a plan, that is a custom call
of its own, which XLA shares among the layers of a model. Used by the JAX front end, and to produce the HLO that
PyTorch/XLA embeds.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flashxla import jax_batching, jax_derivatives, native, native_calls
from flashxla.jax_avals import aval_of, shape_dtype, vary, varying_axes
from flashxla.native import Spec
from flashxla.ops.op import Aval, Call
from flashxla.ops.shapes import Dims
from flashxla.platforms import PLATFORMS, Platform

Observed = list[tuple[Call, tuple[Aval, ...]]]
_observers: contextvars.ContextVar[tuple[Observed, ...]] = contextvars.ContextVar("observers", default=())


@contextlib.contextmanager
def observe() -> Iterator[Observed]:
    """Collect the calls that are traced in the block, with their operands."""
    calls: Observed = []
    token = _observers.set((*_observers.get(), calls))
    try:
        yield calls
    finally:
        _observers.reset(token)


def custom_call(call: Call, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """The custom call on `operands` (the call's, in its order): its results, then what it updates."""
    for calls in _observers.get():
        calls.append((call, tuple(map(aval_of, operands))))
    axes = varying_axes(operands)
    return list(_computation(call, _installed())(*(vary(x, axes) for x in operands)))


def _installed() -> tuple[str, ...]:
    return tuple(name for name in PLATFORMS if native.is_installed(name))


def even_sequences(whole: Call, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """A ragged call whose sequences have one length and lie one behind the other: a batch of calls of one sequence.

    So XLA sees the dimension over which it may divide them.
    """
    for calls in _observers.get():
        calls.append((whole, tuple(map(aval_of, operands))))
    return list(_even_computation(whole, _installed())(*operands))


@functools.lru_cache(maxsize=4096)
def _even_computation(whole: Call, installed: tuple[str, ...]) -> Any:
    count = whole.sizes["S"]
    rows = {symbol: whole.sizes[symbol] // count for symbol in ("T", "Tk")}
    one = whole.resized({"S": 1, **rows})

    # Operands by the dimension that they have in front.
    def axis(dims: Dims) -> int | None:
        return 0 if dims[0].symbol in ("S", *rows) and not dims[0].plus else None

    axes = [axis(dims) for dims in whole.operand_dims]
    each = jax.vmap(_computation(one, installed, even=True), in_axes=axes)

    def computation(*operands: jax.Array) -> list[jax.Array]:
        split = [
            x.reshape(count, -1, *x.shape[1:]) if axis == 0 else x[:2] if dims[0].plus else x
            for x, axis, dims in zip(operands, axes, whole.operand_dims, strict=True)
        ]
        out, *lse = each(*split)
        flat = [out, *(jnp.moveaxis(x, 0, 1) for x in lse)]
        return [x.reshape(aval.shape) for x, (_, aval) in zip(flat, whole.results, strict=True)]

    return jax.jit(computation, inline=True)


@functools.lru_cache(maxsize=4096)
def _computation(call: Call, installed: tuple[str, ...], even: bool = False) -> Any:
    """A call with its derivative. inline: it leaves no function of its own in the programs that contain it."""

    def run(call: Call, operands: Sequence[jax.Array]) -> list[jax.Array]:
        axes = varying_axes(operands)
        return list(_computation(call, installed, even)(*(vary(x, axes) for x in operands)))

    forward = jax_batching.vmapped(call, functools.partial(_computed, installed), even)
    return jax.jit(jax_derivatives.attach(call, forward, run), inline=True)


def _computed(installed: tuple[str, ...], call: Call) -> Callable[..., list[jax.Array]]:
    return functools.partial(_by_platform, call, installed)


def _by_platform(call: Call, installed: tuple[str, ...], *operands: jax.Array) -> list[jax.Array]:
    """The platform is chosen when a program is lowered, not when it runs."""
    branches = {p.jax_lowering: _branch(call, p, p.name in installed) for p in PLATFORMS.values()}
    return jax.lax.platform_dependent(*operands, default=None, **branches)


def _branch(call: Call, platform: Platform, installed: bool) -> Callable[..., list[jax.Array]]:
    return functools.partial(_on_platform if installed else _missing_library, call, platform)


def _missing_library(call: Call, platform: Platform, *operands: jax.Array) -> list[jax.Array]:
    """What a program calls where the library for its platform is missing: XLA's error shows the name."""
    target = f"flashxla: libflashxla_{platform.name}.so is not installed; {platform.how_to_build}"
    updated = [aval_of(operands[i]) for i in call.updates]
    return _ffi_call(target, [*(aval for _, aval in call.results), *updated], operands, {})


def _on_platform(call: Call, platform: Platform, *operands: jax.Array) -> list[jax.Array]:
    """The plan, and the call with it and a workspace, a result that nobody reads."""
    arrays = dict(zip([field for _, field in call.operands], operands, strict=True))
    specs = {field: Spec(str(x.dtype), tuple(x.shape)) for field, x in arrays.items()}
    needs = native_calls.planned_needs(call, platform.name, specs)
    operation = native.library(platform.name).operation(call.op.native)
    if needs.plan_bytes:
        (plan,) = operation.of_kind("plan")
        arrays[plan] = _plan(call, platform, arrays, plan, needs.plan_bytes)

    results = [*call.results, *((field, aval_of(arrays[field])) for field in call.updated_fields)]
    kept = len(results)
    if needs.workspace_bytes:
        (workspace,) = operation.of_kind("workspace")
        results.append((workspace, Aval((needs.workspace_bytes,), native_calls.WORKSPACE_DTYPE)))
    if platform.fence:
        arrays |= _fenced({field: arrays[field] for field in call.updated_fields})
    attributes = {**_binding(call, arrays, results), **_scalars(call, platform)}
    aliases = {operand: len(call.results) + i for i, operand in enumerate(call.updates)}
    target = f"flashxla_{call.op.native}"
    got = _ffi_call(target, [aval for _, aval in results], list(arrays.values()), attributes, aliases)[:kept]
    if platform.fence:
        got = list(_fenced(dict(enumerate(got))).values())
    return got


def _fenced(arrays: dict[Any, jax.Array]) -> dict[Any, jax.Array]:
    """Out of reach of XLA:GPU's fusion of custom calls with slices (XLA of jaxlib 0.11).

    Of K and V that are slices of one tensor it makes a cyclic program ("A cycle is detected"). A call whose results
    become slices of others, as what scan saves for the backward pass, runs twice where they are read elsewhere, too.
    """
    return dict(zip(arrays, jax.lax.optimization_barrier(list(arrays.values())), strict=True))


def _plan(call: Call, platform: Platform, arrays: Mapping[str, jax.Array], name: str, size: int) -> jax.Array:
    """What the call computes from its index tensors.

    Its operands and attributes are what it depends on, and nothing else, so that calls that share those share it.
    """
    fields = native.library(platform.name).operation(call.op.native).fields
    avals = {**{field: aval_of(x) for field, x in arrays.items()}, **dict(call.results)}
    read = {field: x for field, x in arrays.items() if fields[field].plan == "read"}
    shapes = {field: aval for field, aval in avals.items() if fields[field].plan == "static"}
    codes = native.library(platform.name).records.dtypes
    result = [(name, Aval((size,), native_calls.PLAN_DTYPE))]
    attributes = {
        **_binding(call, read, result),
        "shapes": ",".join(
            f"{field}={codes[aval.dtype]}[{','.join(map(str, aval.shape))}]" for field, aval in shapes.items()
        ),
        **{s: value for s, value in _scalars(call, platform).items() if fields[s].plan == "static"},
    }
    target = f"flashxla_{call.op.native}_plan"
    (plan,) = _ffi_call(target, [aval for _, aval in result], list(read.values()), attributes)
    return plan


def _binding(call: Call, operands: Mapping[str, Any], results: Sequence[tuple[str, Aval]]) -> dict[str, str]:
    """Which field each operand and result of a custom call is, and the caller's words for messages."""
    labels = {field: call.labels.get(field, field) for field in operands}
    return {
        "op": call.op.function,
        "operands": ",".join(f if label == f else f"{f}={label}" for f, label in labels.items()),
        "results": ",".join(field for field, _ in results),
    }


def _scalars(call: Call, platform: Platform) -> dict[str, int | float]:
    library = native.library(platform.name)
    return {field: library.scalar(call.op.native, field, value) for field, value in call.attributes}


def _ffi_call(
    target: str,
    results: Sequence[Aval],
    operands: Sequence[jax.Array],
    attributes: Mapping[str, int | float | str],
    aliases: Mapping[int, int] | None = None,
) -> list[jax.Array]:
    ffi_call = jax.ffi.ffi_call(
        target,
        [shape_dtype(r) for r in results],
        vmap_method="sequential",
        input_output_aliases=dict(aliases or {}),
    )
    got = ffi_call(*operands, **{name: _attribute(value) for name, value in attributes.items()})
    axes = varying_axes(operands)
    return [vary(x, axes) for x in got]


def _attribute(value: int | float | str) -> np.int64 | np.float64 | str:
    """The handlers decode 64-bit numbers; JAX would make smaller ones of Python's."""
    if isinstance(value, str):
        return value
    return np.float64(value) if isinstance(value, float) else np.int64(value)
