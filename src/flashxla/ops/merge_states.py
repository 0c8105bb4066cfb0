"""Declaration: merging two attention results over disjoint sets of keys."""

from __future__ import annotations

from typing import Any

from flashxla.ops.cache_format import check_same_dtype
from flashxla.ops.op import Inputs, Op, Resolution
from flashxla.ops.parameters import FLOATS, Result, Tensor
from flashxla.ops.parts import Parallel


def merge_attn_states(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> Any:
    """Merge two attention results over disjoint sets of keys.

    Args:
        out_a, out_b: [T, Hq, D], one dtype.
        lse_a, lse_b: float32 [Hq, T]; -inf or +inf marks an empty part.

    Returns:
        (out [T, Hq, D], lse [Hq, T]) of the union of the keys.

    Raises:
        TypeError, ValueError: wrong dtypes or shapes.
    """
    return out_a, lse_a, out_b, lse_b


def _rule(inputs: Inputs) -> Resolution:
    check_same_dtype(inputs, "out_b", "out_a")
    return Resolution(attributes={}, results={"out": inputs["out_a"], "lse": inputs["lse_a"]})


MERGE_ATTN_STATES = Op(
    "merge_attn_states",
    "merge_states",
    (
        Tensor("out_a", "T H D", FLOATS, "out_a"),
        Tensor("lse_a", "H T", ("float32",), "lse_a"),
        Tensor("out_b", "T H D", FLOATS, "out_b"),
        Tensor("lse_b", "H T", ("float32",), "lse_b"),
    ),
    _rule,
    results=(Result("out", "out", dims="T H D"), Result("lse", "lse", dims="H T")),
    public=merge_attn_states,
    parallel=(Parallel("H"), Parallel("T")),
)
