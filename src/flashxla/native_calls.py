"""A resolved call in the native library's terms: its tensors by field, and what it needs.

Knows no framework: `torch_calls` and `jax_calls` build on it.
"""

from __future__ import annotations

from collections.abc import Mapping

from flashxla import native
from flashxla.native import Needs, Spec
from flashxla.ops.op import Call

PLAN_DTYPE = WORKSPACE_DTYPE = "uint8"


def tensors(call: Call, operands: Mapping[str, Spec]) -> dict[str, Spec]:
    """The operands and results of a call, by field."""
    return {**operands, **{field: Spec(aval.dtype, aval.shape) for field, aval in call.results}}


def needs(call: Call, platform: str, operands: Mapping[str, Spec]) -> Needs:
    """What a call needs whose plan, if its operation has one, is made with the rest, in the workspace.

    Raises ValueError for sizes that the kernels do not take.
    """
    library = native.library(platform)
    args = library.arguments(call.op.native, tensors(call, operands), dict(call.attributes))
    try:
        return library.needs(call.op.native, args)
    except ValueError as error:
        raise ValueError(call.user_message(str(error))) from None


def planned_needs(call: Call, platform: str, operands: Mapping[str, Spec]) -> Needs:
    """What a call needs whose plan is an operand: its workspace is beside the plan."""
    alone = needs(call, platform, operands)
    if not alone.plan_bytes:
        return alone
    (plan,) = native.library(platform).operation(call.op.native).of_kind("plan")
    planned = needs(call, platform, {**operands, plan: Spec(PLAN_DTYPE, (alone.plan_bytes,))})
    return planned._replace(plan_bytes=alone.plan_bytes)
