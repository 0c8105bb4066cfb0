"""JAX front end: eager, jit (also over several devices), grad, scan, shard_map, vmap, export; on cpu and cuda.

The operations of `flashxla.ops`, functional: one that updates a cache returns the new cache, behind its results.
Where the caller donates the cache (`jax.jit` with donate_argnums, or a loop's carry), the new one is the same buffer
and nothing is copied.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

try:
    import jax
    import jax.export
    import jax.numpy as jnp
except ImportError as error:
    raise ImportError("flashxla.jax needs JAX: pip install jax") from error

from flashxla import setup_custom_call
from flashxla.jax_context_parallel import merge_attn_states_over, ring_attention, ring_order
from flashxla.jax_functions import as_array, call, call_even
from flashxla.jax_partition import ShardingWarning
from flashxla.ops import OPS, merge_forms
from flashxla.ops.aliases import with_aliases
from flashxla.ops.callers import in_its_name
from flashxla.ops.flash_attn_forms import FORMS, Form, Offsets
from flashxla.ops.kv_cache_forms import KV_CACHE_FORMS, Frontend, in_front_end
from flashxla.ops.op import Op
from flashxla.xla import registration

if TYPE_CHECKING:
    from flashxla.ops.functions import *  # noqa: F403


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What jax.export must be told to take flashxla's custom calls: its argument `disabled_checks`.

    jax.export promises stability for the custom calls that it knows alone. An exported program calls libraries of
    flashxla, so whoever loads it calls flashxla.setup_custom_call() first.
    """
    targets = registration.targets()
    return [jax.export.DisabledSafetyCheck.custom_call(target) for target in sorted(targets)]


def _function(op: Op, public: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    pairs = [tensor.name for tensor in op.tensors if tensor.updated and tensor.pair]
    at = list(inspect.signature(public).parameters).index(pairs[0]) if pairs else 0

    @functools.wraps(public)
    def function(*args: Any, **kwargs: Any) -> Any:
        own = public(*args, **kwargs)
        if not pairs:
            return call(op, own)
        given = args[at] if len(args) > at else kwargs[pairs[0]]
        return call(op, own, given)

    function.__module__ = __name__
    return function


def _tensors(function: str, given: dict[str, Any]) -> list[Any]:
    # An array of NumPy's cannot be indexed by one that is traced.
    return [None if x is None else as_array(function, name, x, "an array", True) for name, x in given.items()]


def _write(key: Any, value: Any, caches: tuple[Any, Any], slots: Any, layout: str) -> tuple[Any, Any]:
    return _FUNCTIONS["reshape_and_cache_flash"](key, value, *caches, slots, layout=layout)


def _returned_with(results: tuple[Any, ...], caches: tuple[Any, Any]) -> Any:
    return (*results, caches) if results else caches


def _tensor_of(offsets: Offsets, like: Any) -> jax.Array:
    return offsets.length * jnp.arange(offsets.sequences + 1, dtype=jnp.int32)


def _form(form: Callable[..., Form]) -> Callable[..., Any]:
    @functools.wraps(form)
    def function(*args: Any, **kwargs: Any) -> Any:
        made = form(*args, **kwargs)
        if made.dense is None:
            return made.call(_FUNCTIONS["flash_attn_varlen_func"], _tensor_of)
        sequences, _ = made.dense
        return made.call(functools.partial(call_even, sequences), _tensor_of)

    function.__module__ = __name__
    return function


_FUNCTIONS = {op.function: _function(op, op.public) for op in OPS if op.public}
_OWN = frozenset(_FUNCTIONS)
_FUNCTIONS |= {form.__name__: _form(form) for form in FORMS}
_KV_CACHE = Frontend(
    _tensors,
    _tensor_of,
    lambda parts: jnp.concatenate(tuple(parts), -1),
    jnp.asarray,
    jnp.float32,
    _FUNCTIONS["flash_attn_varlen_func"],
    lambda **arguments: None,  # the caches that are given stay as they are
    _write,
    _returned_with,
)
_FUNCTIONS |= {form.__name__: in_front_end(form, _KV_CACHE, __name__) for form in KV_CACHE_FORMS}
_MERGING = merge_forms.Frontend(jnp, jnp.asarray, _FUNCTIONS["merge_attn_states"])
_FUNCTIONS["merge_all_attn_states"] = merge_forms.in_front_end(_MERGING, __name__)
_FUNCTIONS |= {
    name: in_its_name(function, lambda: False) for name, function in _FUNCTIONS.items() if name not in _OWN
}
_FUNCTIONS = {name: with_aliases(function) for name, function in _FUNCTIONS.items()}
globals().update(_FUNCTIONS)

__all__ = [
    "ShardingWarning",
    "export_checks",
    "merge_attn_states_over",
    "ring_attention",
    "ring_order",
    "setup_custom_call",
    *_FUNCTIONS,
]
