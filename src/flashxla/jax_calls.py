"""A resolved call as a JAX computation: one custom call with its aliases declared; on a GPU attention has a second
one, its plan, which XLA shares among the layers of a model.

Used by the JAX front end, and to produce the HLO that PyTorch/XLA embeds.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flashxla import cuda_attention, native
from flashxla.ops.attention import ATTENTION, ATTENTION_PLAN
from flashxla.ops.op import Aval, Call

# What a program for a GPU calls where the library for it is missing: XLA's error shows the name.
MISSING_LIBRARY = f"flashxla: libflashxla_cuda.so is not installed; {native.HOW_TO_BUILD['cuda']}"

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


def shape_dtype(aval: Aval) -> jax.ShapeDtypeStruct:
    """An aval in JAX's terms."""
    return jax.ShapeDtypeStruct(aval.shape, jnp.dtype(aval.dtype))


def custom_call(call: Call, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """The custom call on `operands` (the call's, in its order)."""
    for calls in _observers.get():
        calls.append((call, tuple(map(_aval, operands))))
    return list(_by_platform(call, native.is_installed("cuda"))(*operands))


@functools.lru_cache(maxsize=4096)
def _by_platform(call: Call, cuda: bool) -> Any:
    """A call that is another one on a GPU. The platform is chosen when a program is lowered, not when it runs.

    inline: it leaves no function of its own in the programs that contain it.
    """
    on_cpu = functools.partial(_one_call, call)
    if not cuda:
        on_gpu = functools.partial(_missing_library, call)
    elif call.native is ATTENTION:
        on_gpu = functools.partial(_planned_attention, call)
    elif call.aliases:
        on_gpu = functools.partial(_fenced_update, call)
    else:
        on_gpu = on_cpu

    @jax.custom_jvp
    def computation(*operands: jax.Array) -> list[jax.Array]:
        if on_gpu is on_cpu:
            return on_cpu(*operands)
        return jax.lax.platform_dependent(*operands, default=on_cpu, cuda=on_gpu)

    @computation.defjvp
    def no_derivative(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(
            f"{call.op.function}: no backward pass: a derivative was asked for; keep the call out of what is "
            "differentiated, or give it jax.lax.stop_gradient of its arguments"
        )

    return jax.jit(computation, inline=True)


def _one_call(call: Call, *operands: jax.Array) -> list[jax.Array]:
    aliases = {operand: result for result, operand in call.aliases}
    return _ffi_call(call.native.target, call.results, operands, call.ffi_attributes, aliases)


def _fenced_update(call: Call, *operands: jax.Array) -> list[jax.Array]:
    """A call that updates operands in place, out of reach of XLA:GPU's fusion of custom calls with slices.

    Of K and V that are slices of one tensor it makes a cyclic program ("A cycle is detected", XLA of jaxlib 0.11).
    """
    fenced = list(operands)
    updated = [operand for _, operand in call.aliases]
    values = jax.lax.optimization_barrier([operands[i] for i in updated])
    for i, value in zip(updated, values, strict=True):
        fenced[i] = value
    return jax.lax.optimization_barrier(_one_call(call, *fenced))


def _missing_library(call: Call, *operands: jax.Array) -> list[jax.Array]:
    return _ffi_call(MISSING_LIBRARY, call.results, operands, {})


def _planned_attention(call: Call, *operands: jax.Array) -> list[jax.Array]:
    """Two custom calls: the plan, and attention with it and a workspace, a result that nobody reads."""
    slots = [slot for _, slot in call.operands]
    by_slot = dict(zip(slots, operands, strict=True))
    avals = {slot: _aval(operand) for slot, operand in by_slot.items()}
    needs = cuda_attention.needs_of(call, avals)
    names = call.labels
    planned = [slot for slot in ATTENTION_PLAN.inputs if slot in by_slot]
    attributes = ATTENTION_PLAN.ffi_attributes(
        call.op.function,
        {slot: names[slot] for slot in planned},
        ATTENTION_PLAN.results,
        cuda_attention.plan_scalars(call, avals, needs.engines),
    )
    (plan,) = _ffi_call(
        ATTENTION_PLAN.target,
        [Aval((needs.plan_words,), "int32")],
        [by_slot[slot] for slot in planned],
        attributes,
    )

    results = (*ATTENTION.results[: len(call.results)], "workspace")
    scalars = {**dict(call.attributes), "engines": needs.engines}
    attributes = ATTENTION.ffi_attributes(call.op.function, {**names, "plan": "plan"}, results, scalars)
    avals_out = (*call.results, Aval((needs.bytes_with_a_plan,), "uint8"))
    return _ffi_call(ATTENTION.target, avals_out, (*operands, plan), attributes)[:-1]


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
    return list(ffi_call(*operands, **{name: _attribute(value) for name, value in attributes.items()}))


def _aval(x: jax.Array) -> Aval:
    return Aval(tuple(x.shape), str(x.dtype))


def _attribute(value: int | float | str) -> np.int64 | np.float64 | str:
    """The handlers decode 64-bit numbers; JAX would make smaller ones of Python's."""
    if isinstance(value, str):
        return value
    return np.float64(value) if isinstance(value, float) else np.int64(value)
