"""What torch.autograd does with the operations: gradients by an operation's vjp, or an error that says there is none.

A call whose arguments require grad gives results that require grad, and marks the caches that it updates. Where no
backward pass exists, the error comes when a gradient is computed, so that programs run forward without
torch.no_grad().
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from flashxla import torch_calls
from flashxla.ops.callers import called_by, caller, in_caller_words
from flashxla.ops.op import Op, Vjp
from flashxla.ops.parameters import Tensor
from flashxla.platforms import PLATFORMS
from flashxla.xla import torch_tpu

_AFTER_AUTOGRAD = torch._C._after_autograd_keyset
_PLATFORMS = {getattr(torch._C.DispatchKey, p.torch_key): p.name for p in PLATFORMS.values()}
NO_BACKWARD = "_no_backward"


def define(library: torch.library.Library) -> None:
    """Define the op that stands where a gradient would be computed: it raises when it runs, not when it is traced."""
    library.define(
        f"{NO_BACKWARD}(Tensor grad, str message, SymInt[] shape, ScalarType dtype) -> Tensor",
        tags=(torch.Tag.needs_fixed_stride_order,),
    )
    for key in (*(p.torch_key for p in PLATFORMS.values()), "XLA", torch_tpu.TORCH_KEY):
        library.impl(NO_BACKWARD, no_backward, key)
    torch.library.register_fake(f"flashxla::{NO_BACKWARD}", _fake, lib=library)


def kernel(op: Op, kernels: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The kernel of an op for the dispatch key Autograd, called with the key set first.

    kernels: those of the platforms, called at once where nothing else comes between.
    """
    overload = getattr(torch.ops.flashxla, op.name).default
    tensors = tuple(i for i, p in enumerate(op.parameters) if isinstance(p, Tensor))
    # By the key set of a call: a kernel, or None where something comes between, which dispatch must find out.
    direct: dict[int, Callable[..., Any] | None] = {}

    def autograd(keyset: Any, *args: Any) -> Any:
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            given = [x for x in [args[i] for i in tensors if i < len(args)] if x is not None]
            sources = [x for x in given if x.requires_grad]
            if forward_ad._current_level >= 0:
                _refuse_tangents(op, given)
            if sources and torch.is_grad_enabled():
                return _attached(op, overload, keyset, args, sources)
        key = keyset.raw_repr()
        if key not in direct:
            direct[key] = kernels.get(_platform(keyset) or "")
        if run := direct[key]:
            return run(*args)
        return overload.redispatch(keyset & _AFTER_AUTOGRAD, *args)

    return autograd


def _platform(keyset: Any) -> str | None:
    """Where a call goes from Autograd straight to its kernel: no mode, no subclass, no transform in between."""
    return _PLATFORMS.get((keyset & _AFTER_AUTOGRAD).highestPriorityTypeId())


def _refuse_tangents(op: Op, tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        if forward_ad.unpack_dual(tensor).tangent is not None:
            others = "" if op.vjp else f", and {op.missing_derivative}"
            raise NotImplementedError(f"{op.asked}: no forward-mode derivative{others}")


def _message(op: Op, names: Sequence[str], reason: str = "") -> str:
    return (
        f"{op.no_gradient(reason)}: a gradient was asked for through {in_caller_words(names)}; call it under "
        "torch.no_grad(), or with detached tensors"
    )


@torch_calls.kept
def _why_not(op: Op, signature: torch_calls.Signature) -> str:
    """Why this call has no gradients though its op has, or ""."""
    metas = torch_calls.tensor_metas(op, signature)
    return _vjp_of(op).why_not({name: meta and torch_calls.aval(meta) for name, meta in metas.items()})


def _attached(
    op: Op, overload: Any, keyset: Any, args: Sequence[Any], sources: Sequence[torch.Tensor]
) -> Any:
    """Run a call and make what it computes or updates a part of autograd's graph."""
    values = (*args, *op.defaults[len(args) :])
    reason = _why_not(op, values) if op.vjp else ""

    def message() -> str:
        names = [
            name for name, x in zip(op.names, args, strict=False) if any(x is source for source in sources)
        ]
        return _message(op, names, reason)

    if torch._C._are_functorch_transforms_active():  # torch.func.grad and its kin
        if op.vjp is None or reason:
            raise NotImplementedError(message())
        raise NotImplementedError(f"{op.asked}: torch.func has no backward pass of it; torch.autograd has")

    def run(*args: Any) -> Any:
        # torch.compile takes an update where gradients are off, as in an autograd.Function, for none of autograd's.
        with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keyset & _AFTER_AUTOGRAD, *args)

    if op.vjp is not None and not reason:
        results = differentiable(op, run, values)
    elif op.results:
        results = _Result.apply(lambda: run(*args), message(), *sources)
    else:
        results = run(*args)
    constants = op.vjp.constants if op.vjp else ()
    for tensor in op.updated:
        # One at a time: PyTorch takes no function that updates several views.
        position = op.names.index(tensor.name)
        if tensor.name not in constants and position < len(args) and args[position] is not None:
            _Update.apply(args[position], message(), *sources)
    return results


def differentiable(
    op: Op,
    run: Callable[..., Any],
    args: Sequence[Any],
    around: contextlib.AbstractContextManager[Any] | None = None,
) -> Any:
    """Run an op that has a vjp, as a part of autograd's graph.

    args: all of its arguments. around: what its backward runs in, which autograd may do on a thread of its own.
    """
    refused = _refused(op)
    guarded = [
        _Refused.apply(x, _message(op, [name]))
        if name in refused and isinstance(x, torch.Tensor) and x.requires_grad
        else x
        for name, x in zip(op.names, args, strict=True)
    ]
    return _Differentiable.apply(op, run, around or contextlib.nullcontext(), *guarded)


def _refused(op: Op) -> set[str]:
    """The arguments without a gradient before which `_Refused` can stand: not those that the op updates."""
    return {t.name for t in op.tensors if not t.updated} - _vjp_of(op).gradients


class _Differentiable(torch.autograd.Function):
    """An op with a vjp. Its inputs are those of `differentiable`, the op's arguments at the end."""

    BEFORE = 3  # inputs before the op's arguments

    @staticmethod
    def forward(ctx: Any, op: Op, run: Callable[..., Any], around: Any, *args: Any) -> Any:
        vjp = _vjp_of(op)
        values = dict(zip(op.names, args, strict=True))
        values |= op.asks_for(vjp.residuals)
        got = run(*values.values())
        results = got if isinstance(got, tuple) else (got,)
        by_name = {**values, **{r.name: x for r, x in zip(op.results, results, strict=True)}}
        ctx.op, ctx.around, ctx.caller = op, around, caller()
        ctx.scalars = {s.name: values[s.name] for s in op.scalars}
        ctx.sources = {
            t.name: (tuple(values[t.name].shape), values[t.name].dtype)
            for t in op.tensors
            if values[t.name] is not None
        }
        ctx.results = [(tuple(x.shape), x.dtype, x.device) for x in results]
        ctx.save_for_backward(*(by_name[name] for name in vjp.residuals))
        ctx.set_materialize_grads(False)
        return got

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with ctx.around, called_by(ctx.caller):
            return _Differentiable.gradients(ctx, grads)

    @staticmethod
    def gradients(ctx: Any, grads: Sequence[Any]) -> Any:
        """Those of the inputs."""
        op: Op = ctx.op
        before = _Differentiable.BEFORE
        vjp = _vjp_of(op)
        wanted = [
            name
            for name, is_wanted in zip(op.names, ctx.needs_input_grad[before:], strict=True)
            if is_wanted and name in ctx.sources
        ]
        result: list[torch.Tensor | None] = [None] * (before + len(op.names))
        given = {r.name: grad for r, grad in zip(op.results, grads, strict=True) if grad is not None}
        if not given:
            return tuple(result)
        taken = _cotangents(ctx, vjp, given)
        values: dict[str, Any] = {**dict(zip(vjp.residuals, ctx.saved_tensors, strict=True)), **taken}
        values |= {s.name: ctx.scalars[s.name] for s in vjp.op.scalars}
        got = getattr(torch.ops.flashxla, vjp.op.name)(*(values[name] for name in vjp.op.names))
        gradients = got if isinstance(got, tuple) else (got,)
        by_name = {r.name.removeprefix("grad_"): x for r, x in zip(vjp.op.results, gradients, strict=True)}
        some_grad = next(iter(given.values()))
        # `_Refused` stands before these, and raises if their gradient is asked for.
        guarded = _refused(op)
        refused = [r for r in given if f"grad_{r}" not in taken]
        refused = refused or [n for n in wanted if n not in by_name and n not in guarded]
        for name in wanted:
            shape, dtype = ctx.sources[name]
            if refused:
                raising = getattr(torch.ops.flashxla, NO_BACKWARD)
                gradient = raising(some_grad, _message(op, refused), shape, dtype)
            elif name in guarded:
                gradient = torch.zeros((), dtype=dtype, device=some_grad.device).expand(shape)
            else:
                gradient = by_name[name]
            result[before + op.names.index(name)] = gradient
        return tuple(result)


def _vjp_of(op: Op) -> Vjp:
    assert op.vjp is not None
    return op.vjp


def _cotangents(ctx: Any, vjp: Vjp, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    """The gradients of the results that the vjp takes; zeros where it needs one that did not come."""
    taken: dict[str, torch.Tensor | None] = {}
    for result, (shape, dtype, device) in zip(ctx.op.results, ctx.results, strict=True):
        for tensor in vjp.op.tensors:
            if tensor.name != f"grad_{result.name}":
                continue
            grad = given.get(result.name)
            if grad is None and not tensor.optional:
                grad = torch.zeros(shape, dtype=dtype, device=device)
            taken[tensor.name] = grad
    return taken


class _NoBackward(torch.autograd.Function):
    """Its inputs are some arguments that are no tensors, or not differentiated, then the sources."""

    @staticmethod
    def remember(ctx: Any, message: str, before: int, sources: Sequence[torch.Tensor]) -> None:
        ctx.message, ctx.before = message, before
        ctx.sources = [(tuple(t.shape), t.dtype) for t in sources]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = next(grad for grad in grads if grad is not None)
        wanted = ctx.needs_input_grad[ctx.before :]
        raising = getattr(torch.ops.flashxla, NO_BACKWARD)
        return (
            *(None for _ in range(ctx.before)),
            *(
                raising(grad, ctx.message, *source) if is_wanted else None
                for source, is_wanted in zip(ctx.sources, wanted, strict=True)
            ),
        )


class _Refused(_NoBackward):
    """An argument of an op with a vjp, which has no gradient: asked for one, it raises, and only then."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, message: str) -> Any:
        _NoBackward.remember(ctx, message, 0, [tensor])
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (*_NoBackward.backward(ctx, *grads), None)


class _Result(_NoBackward):
    """The results of an op."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], Any], message: str, *sources: torch.Tensor) -> Any:
        _NoBackward.remember(ctx, message, 2, sources)
        return run()


class _Update(_NoBackward):
    """A tensor that an op has updated."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, message: str, *sources: torch.Tensor) -> Any:
        ctx.mark_dirty(tensor)
        _NoBackward.remember(ctx, message, 2, sources)
        return tensor


def no_backward(grad: torch.Tensor, message: str, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """The kernel of the op that stands where a gradient would be computed."""
    raise NotImplementedError(message)


def _fake(grad: torch.Tensor, message: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return grad.new_empty(shape, dtype=dtype)
