"""Declaration: merging two attention results over disjoint sets of keys."""

from __future__ import annotations

from flashxla.ops.cache_format import check_same_dtype
from flashxla.ops.op import FLOATS, Inputs, Native, Op, Resolution, Tensor

MERGE_STATES = Native("merge_states", inputs=("out_a", "lse_a", "out_b", "lse_b"), results=("out", "lse"))


def _merge_attn_states(inputs: Inputs) -> Resolution:
    check_same_dtype(inputs, "out_b", "out_a")
    return Resolution(attributes={}, results=(inputs["out_a"], inputs["lse_a"]))


MERGE_ATTN_STATES = Op(
    "merge_attn_states",
    MERGE_STATES,
    (
        Tensor("out_a", "T H D", FLOATS, slot="out_a"),
        Tensor("lse_a", "H T", ("float32",), slot="lse_a"),
        Tensor("out_b", "T H D", FLOATS, slot="out_b"),
        Tensor("lse_b", "H T", ("float32",), slot="lse_b"),
    ),
    _merge_attn_states,
    result_names=("out", "lse"),
)
