"""What torch.autograd does with the operations: none has a backward pass, and whoever asks for a gradient is told so.

A call whose arguments require grad gives results that require grad, and marks the caches that it updates. The error
comes when a gradient is computed, so that programs run forward without torch.no_grad().
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from flashxla.ops import Op, Tensor

_AFTER_AUTOGRAD = torch._C._after_autograd_keyset
_PLATFORMS = {torch._C.DispatchKey.CPU: "cpu", torch._C.DispatchKey.CUDA: "cuda"}
_NO_BACKWARD = "_no_backward"


def define(library: torch.library.Library) -> None:
    """Define the op that stands where a gradient would be computed: it raises when it runs, not when it is traced."""
    library.define(
        f"{_NO_BACKWARD}(Tensor grad, str message, SymInt[] shape, ScalarType dtype) -> Tensor",
        tags=(torch.Tag.needs_fixed_stride_order,),
    )
    for key in ("CPU", "CUDA", "XLA"):
        library.impl(_NO_BACKWARD, _raise, key)
    torch.library.register_fake(f"flashxla::{_NO_BACKWARD}", _fake, lib=library)


def kernel(op: Op, kernels: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The kernel of an op for the dispatch key Autograd, called with the key set first.

    kernels: those of "cpu" and "cuda", called at once where nothing else comes between.
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
            raise NotImplementedError(f"{op.function}: no forward-mode derivative, and no backward pass")


def _attached(
    op: Op, overload: Any, keyset: Any, args: Sequence[Any], sources: Sequence[torch.Tensor]
) -> Any:
    """Run a call and make what it computes or updates a part of autograd's graph."""
    names = [name for name, x in zip(op.names, args, strict=False) if any(x is source for source in sources)]
    message = (
        f"{op.function}: no backward pass: a gradient was asked for through {', '.join(names)}; call it under "
        "torch.no_grad(), or with detached tensors"
    )
    if torch._C._are_functorch_transforms_active():  # torch.func.grad and its kin do nothing else
        raise NotImplementedError(message)

    def run() -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keyset & _AFTER_AUTOGRAD, *args)

    if not op.mutated:
        return _Result.apply(run, message, *sources)
    run()
    for tensor in op.mutated:
        # One at a time: PyTorch takes no function that updates several views.
        _Update.apply(args[op.names.index(tensor.name)], message, *sources)
    return None


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
        no_backward = getattr(torch.ops.flashxla, _NO_BACKWARD)
        return (
            *(None for _ in range(ctx.before)),
            *(
                no_backward(grad, ctx.message, *source) if is_wanted else None
                for source, is_wanted in zip(ctx.sources, wanted, strict=True)
            ),
        )


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


def _raise(grad: torch.Tensor, message: str, shape: Sequence[int], dtype: torch.dtype) -> Any:
    raise NotImplementedError(message)


def _fake(grad: torch.Tensor, message: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return grad.new_empty(shape, dtype=dtype)
