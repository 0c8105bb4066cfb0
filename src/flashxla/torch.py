"""PyTorch front end: eager and torch.compile on cpu and cuda, lazy and openxla on XLA tensors.

The operations of `flashxla.ops`. Caches are updated in place on every device. In their descriptions: T query tokens
(padded), S sequences (padded), Hq query heads, Hk KV heads, D head size (Dv of values), P blocks, B block size, M
blocks a sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

try:
    import torch
except ImportError as error:
    from flashxla import install

    raise ImportError(
        f"flashxla.torch needs PyTorch: {install.command('torch')}, or '.[torch-xla]' for PyTorch/XLA"
    ) from error

from flashxla import setup_custom_call, torch_aliases, torch_calls, torch_library
from flashxla.ops import OPS, merge_forms
from flashxla.ops.aliases import with_aliases
from flashxla.ops.callers import in_its_name
from flashxla.ops.flash_attn_forms import FORMS, Form, Offsets
from flashxla.ops.flash_attn_varlen import FLASH_ATTN_VARLEN
from flashxla.ops.flash_attn_varlen import flash_attn_varlen_func as attention_arguments
from flashxla.ops.kv_cache_forms import KV_CACHE_FORMS, Frontend, in_front_end
from flashxla.ops.messages import type_error
from flashxla.ops.op import Op
from flashxla.torch_calls import LONG_WAY
from flashxla.torch_short_way import ShortWay
from flashxla.xla import lazy

if TYPE_CHECKING:
    from flashxla.ops.functions import *  # noqa: F403

torch_library.register_all()
torch_aliases.register_all()


def from_dlpack(external: Any) -> torch.Tensor:
    """An XLA tensor that shares the memory of another framework's tensor on the same device; nothing is copied.

    Args:
        external: an object with __dlpack__, such as a torch.cuda tensor or a JAX array; dense, row-major. On a GPU
            where PyTorch/XLA runs on one, else on the CPU. It must not change while XLA reads it.

    Returns:
        A tensor on torch_xla's device, whose buffer is external's memory and keeps it alive. On a GPU flashxla's
        in-place operations update that memory; on the CPU the first update gives the tensor new memory. Other
        operations make new tensors.

    Raises:
        TypeError, ValueError: no DLPack tensor, another device, strides, an address that XLA does not take, or a type
            that it has not.
        RuntimeError: in SPMD mode on the CPU.
    """
    from flashxla.xla import dlpack

    return dlpack.from_dlpack(external)


def to_dlpack(tensor: torch.Tensor) -> Any:
    """An XLA tensor for another framework's from_dlpack: torch.from_dlpack(fx.to_dlpack(x)); nothing is copied.

    Computes what is pending on the tensor's device, and waits for it. While the other framework holds the memory,
    update the tensor by flashxla's in-place operations only; it sees their updates after a sync.

    Raises:
        TypeError, ValueError: no XLA tensor, or a type that DLPack has no code for.
    """
    from flashxla.xla import dlpack

    return dlpack.to_dlpack(tensor)


def shard_map(
    function: Callable[..., Any],
    mesh: Any,
    in_specs: Sequence[tuple[Any, ...] | None],
    out_specs: Sequence[tuple[Any, ...] | None],
    updated: Sequence[int] = (),
) -> Callable[..., Any]:
    """A function that runs on each device's part of its arguments, in PyTorch/XLA's SPMD mode.

    XLA's partitioner cannot look into a custom call: left to itself it gathers what is sharded, the caches too.
    Heads do not depend on each other, so each device can run the operations on its own.

    Args:
        function: takes and returns tensors, of the size of one device's part.
        mesh: a torch_xla.distributed.spmd.Mesh with named axes.
        in_specs: for each argument the mesh axis of each dimension, (None, "heads", None), or None: replicated.
        out_specs: the same for each result.
        updated: the numbers of the arguments that function updates in place.

    Returns:
        A function of whole tensors, those sharded by mark_sharding with the same specs.

    As jax.shard_map, which serves flashxla.jax.
    """
    from flashxla.xla import spmd

    return spmd.shard_map(function, mesh, in_specs, out_specs, updated)


_SHORT_WAYS = {op.name: ShortWay(op) for op in OPS if op.public}


def _function(op: Op, public: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    # PyTorch's own messages about wrong types would name no function of ours, so arguments are looked at first.
    overload = getattr(torch.ops.flashxla, op.name).default
    wanted = [op.names.index(r.when) if r.when else None for r in op.results]
    short_way, lazy_short_way = _SHORT_WAYS[op.name], lazy.short_way(op)

    def long_way(values: torch_calls.Values) -> Any:
        results = overload(*values)
        if len(wanted) < 2:
            return results
        kept = tuple([r for r, when in zip(results, wanted, strict=True) if when is None or values[when]])
        return kept[0] if len(kept) == 1 else kept

    @functools.wraps(public)
    def function(*args: Any, **kwargs: Any) -> Any:
        values = public(*args, **kwargs)
        if torch.compiler.is_compiling():
            return long_way(torch_calls.checked(op, values))
        if (results := short_way(values)) is not LONG_WAY:
            return results
        other = torch_calls.OTHER_WAYS.get(type(values[0]))
        if other and (results := other(op, values)) is not LONG_WAY:
            return results
        given, values = values, torch_calls.checked(op, values)
        if values[0].is_xla and (results := lazy_short_way(values)) is not LONG_WAY:
            return results
        results = long_way(values)
        if values is given:
            short_way.learn(values)
        return results

    function.__module__ = __name__
    return function


def _tensors(function: str, given: dict[str, Any]) -> list[Any]:
    tensors = {name: x for name, x in given.items() if x is not None}
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise type_error(function, name, f"{type(x).__module__}.{type(x).__name__}", "a torch.Tensor")
    torch_calls.check_devices(function, next(iter(tensors)), tensors)
    return list(given.values())


def _check_attention(**arguments: Any) -> None:
    # torch.compile checks a whole program before any of it runs.
    if torch.compiler.is_compiling():
        return
    values = attention_arguments(**arguments)
    if not _SHORT_WAYS[FLASH_ATTN_VARLEN.name].knows(values):
        torch_calls.check(FLASH_ATTN_VARLEN, values)


def _write(key: Any, value: Any, caches: tuple[Any, Any], slots: Any, layout: str) -> tuple[Any, Any]:
    _FUNCTIONS["reshape_and_cache_flash"](key, value, *caches, slots, layout=layout)
    return caches


def _returned(results: tuple[Any, ...], caches: tuple[Any, Any]) -> Any:
    return results if len(results) > 1 else results[0] if results else None


def _tensor_of(offsets: Offsets, like: torch.Tensor) -> torch.Tensor:
    numbers = torch.arange(offsets.sequences + 1, dtype=torch.int32, device=like.device)
    return numbers if offsets.length == 1 else offsets.length * numbers


def _as_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype)


def _form(form: Callable[..., Form]) -> Callable[..., Any]:
    @functools.wraps(form)
    def function(*args: Any, **kwargs: Any) -> Any:
        return form(*args, **kwargs).call(_FUNCTIONS["flash_attn_varlen_func"], _tensor_of)

    function.__module__ = __name__
    return function


_FUNCTIONS = {op.function: _function(op, op.public) for op in OPS if op.public}
_OWN = frozenset(_FUNCTIONS)
_FUNCTIONS |= {form.__name__: _form(form) for form in FORMS}
_KV_CACHE = Frontend(
    _tensors,
    _tensor_of,
    lambda parts: torch.cat(tuple(parts), -1),
    _as_dtype,
    torch.float32,
    _FUNCTIONS["flash_attn_varlen_func"],
    _check_attention,
    _write,
    _returned,
)
_FUNCTIONS |= {form.__name__: in_front_end(form, _KV_CACHE, __name__) for form in KV_CACHE_FORMS}
_MERGING = merge_forms.Frontend(torch, _as_dtype, _FUNCTIONS["merge_attn_states"])
_FUNCTIONS["merge_all_attn_states"] = merge_forms.in_front_end(_MERGING, __name__)
# torch.compile runs autograd when these have returned.
_FUNCTIONS |= {
    name: in_its_name(function, torch.compiler.is_compiling)
    for name, function in _FUNCTIONS.items()
    if name not in _OWN
}
_FUNCTIONS = {name: with_aliases(function) for name, function in _FUNCTIONS.items()}
globals().update(_FUNCTIONS)

__all__ = ["from_dlpack", "setup_custom_call", "shard_map", "to_dlpack", *_FUNCTIONS]
