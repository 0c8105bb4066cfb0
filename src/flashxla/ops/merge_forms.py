"""Merging any number of attention results, as calls of merge_attn_states, for every front end."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from flashxla.ops.flash_attn_forms import check_dtype, dtype_of, shape_of
from flashxla.ops.messages import type_error, value_error
from flashxla.ops.parameters import FLOATS


@dataclasses.dataclass(frozen=True)
class Frontend:
    """What merging needs of a front end.

    functions: a module with where, isfinite, maximum and full_like. cast: a tensor as another dtype. merge:
    merge_attn_states.
    """

    functions: Any
    cast: Callable[[Any, Any], Any]
    merge: Callable[..., tuple[Any, Any]]


Form = Callable[[Frontend], tuple[Any, Any]]


def merge_all_attn_states(outs: Any, lses: Any) -> Form:
    """Merge any number of attention results over disjoint sets of keys: merge_attn_states, one after the other.

    Results of 16 bits are merged in float32 and rounded once.

    Args:
        outs: a list of tensors [T, Hq, D], or one [N, T, Hq, D]; one dtype.
        lses: as many, float32 [Hq, T], or one [N, Hq, T]; natural logarithms. -inf or +inf marks an empty part.

    Returns:
        (out [T, Hq, D], lse [Hq, T]) of the union of the keys.

    Raises:
        TypeError, ValueError: wrong dtypes or shapes, no results, or not as many of the one as of the other.
    """
    function = "merge_all_attn_states"
    outs, lses = _listed(function, "outs", outs), _listed(function, "lses", lses)
    if len(outs) != len(lses):
        raise value_error(function, "lses", f"{len(lses)} LSEs", f"{len(outs)}, as many as outs")
    tokens, heads, size = shape_of(function, "outs[0]", outs[0], "T Hq D")
    dtypes: tuple[str, ...] = FLOATS
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        shape_of(function, f"outs[{i}]", out, "T Hq D", T=tokens, Hq=heads, D=size)
        shape_of(function, f"lses[{i}]", lse, "Hq T", Hq=heads, T=tokens)
        check_dtype(function, f"outs[{i}]", out, dtypes)
        check_dtype(function, f"lses[{i}]", lse, ("float32",))
        dtypes = (dtype_of(outs[0]),)
    return functools.partial(_merged, outs, lses)


def _merged(outs: tuple[Any, ...], lses: tuple[Any, ...], frontend: Frontend) -> tuple[Any, Any]:
    xp, dtype = frontend.functions, outs[0].dtype
    if len(outs) == 1:
        return frontend.merge(outs[0], lses[0], outs[0], xp.full_like(lses[0], -float("inf")))
    # Weights depend on differences alone, but a merged LSE is rounded. Around the largest one that rounding is small.
    finite = [xp.where(xp.isfinite(lse), lse, -float("inf")) for lse in lses]
    top = functools.reduce(xp.maximum, finite)
    top = xp.where(xp.isfinite(top), top, 0.0)
    out, lse = frontend.cast(outs[0], xp.float32), lses[0] - top
    for other, other_lse in zip(outs[1:], lses[1:], strict=True):
        out, lse = frontend.merge(out, lse, frontend.cast(other, xp.float32), other_lse - top)
    return frontend.cast(out, dtype), lse + top


def _listed(function: str, name: str, tensors: Any) -> tuple[Any, ...]:
    accepted = "a list of tensors, or one tensor of them all"
    try:
        listed = tuple(tensors)
    except TypeError as error:
        got = f"shape {list(tensors.shape)}" if hasattr(tensors, "shape") else repr(tensors)
        raise type_error(function, name, got, accepted) from error
    if not listed:
        raise value_error(function, name, "none", "at least one")
    return listed


def in_front_end(frontend: Frontend, module: str) -> Callable[..., tuple[Any, Any]]:
    """`merge_all_attn_states` as a function of a front end's module."""

    @functools.wraps(merge_all_attn_states)
    def function(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return merge_all_attn_states(*args, **kwargs)(frontend)

    function.__module__ = module
    return function
