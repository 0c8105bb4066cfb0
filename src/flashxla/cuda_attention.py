"""Attention on a GPU, planned: what its call needs, and the call that makes its plan.

Knows no framework: `jax_calls` makes a plan an operation of the program, `torch_calls` leaves it to the library.
"""

from __future__ import annotations

from collections.abc import Mapping

from flashxla import native
from flashxla.native import AttentionNeeds, CTensor
from flashxla.ops.attention import ATTENTION, ATTENTION_PLAN
from flashxla.ops.cache_format import DTYPE_CODES, LAYOUT_CODES, ONE_TENSOR_DIMS, PAIR_DIMS
from flashxla.ops.op import Aval, Call
from flashxla.ops.shapes import Sizes, match

_LAYOUTS = {code: name for name, code in LAYOUT_CODES.items()}


def needs(call: Call, operands: Mapping[str, CTensor]) -> AttentionNeeds:
    """What a call of attention needs. operands: by native field; their addresses do not matter.

    Raises ValueError for sizes that the kernels do not take.
    """
    results = zip(ATTENTION.results, call.results, strict=False)
    tensors = {slot: CTensor.of(DTYPE_CODES[r.dtype], r.shape) for slot, r in results}
    try:
        return native.library("cuda").attention_needs({**operands, **tensors}, dict(call.attributes))
    except ValueError as error:
        raise ValueError(call.user_message(str(error))) from None


def needs_of(call: Call, avals: Mapping[str, Aval]) -> AttentionNeeds:
    """The same for dense row-major operands."""
    return needs(call, {slot: CTensor.of(DTYPE_CODES[a.dtype], a.shape) for slot, a in avals.items()})


def plan_scalars(call: Call, avals: Mapping[str, Aval], engines: int) -> dict[str, int]:
    """The scalars of ATTENTION_PLAN: of them and the index tensors alone depends the plan."""
    attributes = dict(call.attributes)
    tokens, heads, _ = avals["q"].shape
    k = avals["k"].shape
    if "block_table" in avals:
        sizes: Sizes = {}
        match(k, {**PAIR_DIMS, **ONE_TENSOR_DIMS}[_LAYOUTS[int(attributes["layout"])]], sizes, "k")
        blocks, block_size, kv_heads = (sizes[symbol][0] for symbol in ("P", "B", "Hk"))
    else:
        blocks, block_size, kv_heads = 1, k[0], k[1]
    scalars = {
        "engines": engines,
        "num_tokens": tokens,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "num_blocks": blocks,
        "block_size": block_size,
    }
    shared = {name: int(attributes[name]) for name in ("causal", "window_left", "window_right")}
    assert {*scalars, *shared} == set(ATTENTION_PLAN.integers)
    return {**scalars, **shared}
