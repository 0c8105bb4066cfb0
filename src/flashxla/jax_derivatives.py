"""What JAX differentiates: a call's vjp, from its declaration. A call without one raises where it is asked for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from flashxla.jax_avals import aval_of
from flashxla.jax_partition import retyped
from flashxla.ops.callers import in_caller_words
from flashxla.ops.op import Call, Vjp

Run = Callable[[Call, Sequence[jax.Array]], list[jax.Array]]


def attach(call: Call, forward: Callable[..., list[jax.Array]], run: Run) -> Callable[..., list[jax.Array]]:
    """A computation of a call's operands with the call's derivative. run: how another call is run."""
    if call.op.vjp is None or call.op.vjp.why_not(dict(call.arguments)):
        return _without_derivative(call, forward)
    return _with_vjp(call, call.op.vjp, forward, run)


def no_backward(call: Call, arguments: Sequence[str] = ()) -> NotImplementedError:
    """What says that there is no gradient, of these arguments."""
    of = f" of {in_caller_words(arguments)}" if arguments else ""
    reason = call.op.vjp.why_not(dict(call.arguments)) if call.op.vjp else ""
    return NotImplementedError(
        f"{call.op.no_gradient(reason)}: a derivative{of} was asked for; keep it out of what is "
        "differentiated, or give the call jax.lax.stop_gradient of its arguments"
    )


def _without_derivative(call: Call, forward: Callable[..., Any], arguments: Sequence[str] = ()) -> Any:
    @jax.custom_jvp
    def computation(*operands: jax.Array) -> Any:
        return forward(*operands)

    @computation.defjvp
    def no_derivative(primals: Any, tangents: Any) -> Any:
        raise no_backward(call, arguments)

    return computation


def _with_vjp(call: Call, vjp: Vjp, forward: Callable[..., list[jax.Array]], run: Run) -> Any:
    names = [name for name, _ in call.operands]
    updated = [names[i] for i in call.updates]
    constants = set(vjp.constants)
    requested = call.requesting(vjp.residuals)
    result_names = call.result_names

    def refuse(name: str) -> Callable[[jax.Array], jax.Array]:
        return _without_derivative(call, lambda x: x, [name])

    guards = {name: refuse(name) for name in names if name not in vjp.gradients | constants}

    @jax.custom_vjp
    def differentiable(*operands: jax.Array) -> list[jax.Array]:
        return forward(*operands)

    def save(*primals: Any) -> Any:
        operands = [p.value for p in primals]
        got = run(requested, operands)
        of_results = dict(zip(requested.result_names, got, strict=False))
        values = {**dict(zip(names, operands, strict=True)), **of_results}
        outputs = [*(of_results[name] for name in result_names), *got[len(of_results) :]]
        return outputs, {name: values[name] for name in vjp.residuals if name in values}

    def differentiate(residuals: dict[str, jax.Array], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        given = {
            name: ct
            for name, ct in zip((*result_names, *updated), cotangents, strict=True)
            if name not in constants and not _is_zero(ct)
        }
        tensors: dict[str, Any] = dict(residuals)
        for tensor in vjp.op.tensors:
            if tensor.name in residuals or tensor.name in vjp.residuals:
                continue
            name = tensor.name.removeprefix("grad_")
            if name in given:
                tensors[tensor.name] = given.pop(name)
            elif not tensor.optional:
                zero = cotangents[result_names.index(name)]
                tensors[tensor.name] = jnp.zeros(zero.shape, zero.dtype)
        if given:
            raise no_backward(call, list(given))
        backward = call.gradients({name: aval_of(x) for name, x in tensors.items()})
        got = run(backward, [tensors[name] for name, _ in backward.operands])
        by_name = dict(zip(backward.result_names, got, strict=True))
        return tuple(
            None if grad is None else retyped(grad, tensors[name])
            for name, grad in ((name, by_name.get(f"grad_{name}")) for name in names)
        )

    differentiable.defvjp(save, differentiate, symbolic_zeros=True)

    def computation(*operands: jax.Array) -> list[jax.Array]:
        guarded = [guards[n](x) if n in guards else x for n, x in zip(names, operands, strict=True)]
        return differentiable(*guarded)

    return computation


def _is_zero(cotangent: Any) -> bool:
    """Whether nothing was asked of an output: no gradient came, or its type has none."""
    return isinstance(cotangent, jax.custom_derivatives.SymbolicZero) or cotangent.dtype == jax.dtypes.float0
