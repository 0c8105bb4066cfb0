"""torchax front end: the functions of `flashxla.torch` on torchax's tensors, device "jax".

    import flashxla.torchax
    flashxla.torchax.register()

Eager, a call updates a cache in place where nothing else holds its array; where a clone or a detached tensor does, the
cache gets a new array and the other keeps the old one. Under `torchax.interop.jax_jit` caches are arguments, donated,
and results, as in JAX: an update of anything else would be lost, and is an error.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flashxla import install

try:
    import jax
    import torch
    import torchax
    from torchax import interop
    from torchax.ops.ops_registry import Operator
    from torchax.tensor import Tensor
    from torchax.view import View
except ImportError as error:
    raise ImportError(f"flashxla.torchax needs torchax: {install.command('torchax')}") from error
except AttributeError as error:  # of an operation that a newer PyTorch has no more
    got = f"torchax {install.version('torchax')} with PyTorch {install.version('torch')}"
    raise ImportError(
        f"flashxla.torchax: got {got}, which do not go together: {error}; accepted: torchax 0.0.13 with PyTorch "
        "2.11 or 2.12"
    ) from error

from flashxla import jax_calls, jax_derivatives, torch_autograd, torch_calls, torch_library, torchax_calls
from flashxla import torch as _torch_front_end  # noqa: F401  (defines torch.ops.flashxla)
from flashxla.jax_avals import aval_of
from flashxla.ops import OPS
from flashxla.ops.messages import type_error
from flashxla.ops.op import Call, Op
from flashxla.xla import registration

__all__ = ["register"]


def register(env: Any = None) -> None:
    """Make the functions of `flashxla.torch` take torchax's tensors. A second call does nothing.

    Args:
        env: a torchax.tensor.Environment; None: torchax.default_env().
    """
    registration.register_jax()
    env = env or torchax.default_env()
    kernels = {op.name: _kernel(op, env) for op in OPS}
    kernels[torch_autograd.NO_BACKWARD] = torch_autograd.no_backward
    for name, kernel in kernels.items():
        overload = getattr(torch.ops.flashxla, name).default
        # is_view_op: views arrive as they are, so that a cache that is one can be written through it.
        env._ops.setdefault(
            overload,
            Operator(
                overload,
                kernel,
                is_jax_function=False,
                is_user_defined=True,
                needs_env=False,
                is_view_op=True,
            ),
        )
    torch_calls.OTHER_WAYS[Tensor] = torchax_calls.short_way
    if interop.call_torch is not _call_torch:
        interop.call_torch = _call_torch


# Calls


def _kernel(op: Op, env: Any) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        values = dict(zip(op.names, torch_library.values_of(op, args), strict=True))
        tensors = {t.name: values[t.name] for t in op.tensors if values[t.name] is not None}
        for name, x in tensors.items():
            if not isinstance(x, Tensor | View):
                raise type_error(
                    op.function, name, f"a tensor on {x.device}", "a tensor on jax, as the others"
                )
        avals = {t.name: aval_of(tensors[t.name].jax()) if t.name in tensors else None for t in op.tensors}
        attached = torch.is_grad_enabled() and any(x.requires_grad for x in tensors.values())
        if attached and op.vjp and not op.vjp.why_not(avals):
            # Which calls this kernel again, where gradients are off.
            return torch_autograd.differentiable(op, kernel, tuple(values.values()), around=env)
        call = op.resolve(avals, {s.name: values[s.name] for s in op.scalars})
        if attached:
            return _without_gradients(call, tensors)
        arrays = _run(call, tensors)
        updated = [call.operands[i][0] for i in call.updates]
        for name, new in zip(updated, arrays[len(call.results) :], strict=True):
            _assign(call, name, tensors[name], new)
        return _returned(call, [Tensor(x, env) for x in arrays[: len(call.results)]])

    return kernel


def _run(call: Call, tensors: dict[str, Any]) -> list[jax.Array]:
    """The results and the updated arrays; in place where nothing else holds what is updated."""
    names = [name for name, _ in call.operands]
    donated = tuple(i for i in call.updates if torchax_calls.is_alone(tensors[names[i]]))
    operands = [tensors[name].jax() for name in names]
    if any(isinstance(x, jax.core.Tracer) for x in operands):
        return jax_calls.custom_call(call, operands)
    return list(torchax_calls.program(call, donated)(*operands))


def _without_gradients(call: Call, tensors: dict[str, Any]) -> Any:
    """The results as part of autograd's graph. JAX raises what says that there is no gradient."""
    names = [name for name, _ in call.operands]
    if call.updates:
        raise jax_derivatives.no_backward(call, [name for name in names if tensors[name].requires_grad])
    # torchax hands it on as a function of PyTorch's.
    run = interop.j2t_autograd(
        interop.torch_view(lambda *operands: tuple(jax_calls.custom_call(call, operands)))
    )
    return _returned(call, list(run(*(tensors[name] for name in names))))


def _returned(call: Call, results: Sequence[torch.Tensor]) -> Any:
    """What the op returns: results that the call does not compute are empty."""
    got = dict(zip([field for field, _ in call.results], results, strict=True))
    if len(got) < len(call.op.results):
        with jax.ensure_compile_time_eval():
            empty = Tensor(_nothing(), torchax.default_env())
        results = [got.get(r.field, empty) for r in call.op.results]
    return results[0] if len(results) == 1 else tuple(results) or None


@functools.cache
def _nothing() -> jax.Array:
    return jax.numpy.zeros((0,), "float32")


# Updates


def _assign(call: Call, name: str, x: Any, new: jax.Array) -> None:
    if isinstance(new, jax.core.Tracer):
        _note(call, name, x)
    if isinstance(x, View):
        x.update(new)
    else:
        x._elem = new


# Updates while a function is traced


@dataclasses.dataclass
class _Update:
    """The first update of a tensor in a traced function."""

    message: str
    tensor: Any
    before: Any  # its array then


_traced: contextvars.ContextVar[dict[int, _Update] | None] = contextvars.ContextVar("traced", default=None)


def _note(call: Call, name: str, x: Any) -> None:
    while isinstance(x, View):
        x = x.parent
    message = f"{call.op.function}: {call.op.label(name, dict(call.arguments).__contains__)}: "
    if not isinstance(x._elem, jax.core.Tracer):
        raise RuntimeError(
            f"{message}got a tensor from outside of the function that JAX traces, which would lose the update; "
            "accepted: an argument of the function, which returns it, too"
        )
    updates = _traced.get()
    if updates is not None:
        updates.setdefault(id(x), _Update(message, x, x._elem))


_call_torch_itself = interop.call_torch


@functools.wraps(_call_torch_itself)
def _call_torch(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """torchax's, for functions that JAX traces: the updates of their arguments must be among their results."""
    with _watch() as updates:
        results = _call_torch_itself(function, *args, **kwargs)
    given = {id(x) for x in jax.tree.leaves((args, kwargs))}
    returned = {id(x) for x in jax.tree.leaves(results)}
    for update in updates.values():
        if id(update.before) in given and id(update.tensor._elem) not in returned:
            raise RuntimeError(
                f"{update.message}got an argument of a function that JAX traces, which does not return it: the update "
                "would be lost; accepted: a function that returns the caches it updates (JittableModule does not "
                "return its module's buffers: pass caches as arguments)"
            )
    return results


@contextlib.contextmanager
def _watch() -> Iterator[dict[int, _Update]]:
    updates: dict[int, _Update] = {}
    token = _traced.set(updates)
    try:
        yield updates
    finally:
        _traced.reset(token)
