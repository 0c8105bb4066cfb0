"""What the declarations of attention share: checks, native scalars, results."""

from __future__ import annotations

import functools
import math
import os
from typing import Any

from flashxla.ops.cache_format import element_dtype
from flashxla.ops.op import Aval, Inputs
from flashxla.ops.parameters import FP8, Result
from flashxla.ops.parts import Parallel

MAX_HEAD_SIZE = 576  # of queries and keys
MAX_VALUE_HEAD_SIZE = 512
INT32_MAX = 2**31 - 1
DESCALE = "()|1|Hk|S Hk"
HEADS = Parallel("Hk", "Hq")
RESULTS = (
    Result("out", "out", dims="T Hq Dv"),
    Result("softmax_lse", "lse", when="return_softmax_lse", dims="Hq T"),
)


def check_query(inputs: Inputs, query: str, key: str) -> str:
    """Checks that hold for every attention op. Returns the dtype of a K/V element."""
    check_heads(inputs, query, key)
    element = element_dtype(inputs, key)
    q_dtype = inputs[query].dtype
    accepted = FP8 if q_dtype in FP8 else (q_dtype, *FP8)
    if element not in accepted:
        raise inputs.type_error(key, f"dtype {element}", f"{', '.join(accepted)} with a {q_dtype} {query}")
    return element


def check_heads(inputs: Inputs, query: str, key: str) -> None:
    """Raise unless the numbers of heads go together, and the kernels take their sizes."""
    if not 1 <= inputs.size("D") <= MAX_HEAD_SIZE:
        raise inputs.value_error(query, f"head size {inputs.size('D')}", f"1 to {MAX_HEAD_SIZE}")
    if not 1 <= inputs.size("Dv") <= MAX_VALUE_HEAD_SIZE:
        values = next((n for n in ("value", "v", "value_cache") if inputs.tensors.get(n) is not None), key)
        raise inputs.value_error(values, f"head size {inputs.size('Dv')}", f"1 to {MAX_VALUE_HEAD_SIZE}")
    if inputs.size("Hk") < 1 or inputs.size("Hq") % inputs.size("Hk") != 0:
        raise inputs.value_error(
            query,
            f"{inputs.size('Hq')} heads",
            f"a multiple of the {inputs.size('Hk')} heads of {inputs.label(key)}",
        )


def results(inputs: Inputs, query: str) -> dict[str, Aval]:
    """The output and its LSE."""
    tokens, heads = inputs.size("T"), inputs.size("Hq")
    dtype = inputs[query].dtype
    out = Aval((tokens, heads, inputs.size("Dv")), "bfloat16" if dtype in FP8 else dtype)
    return {"out": out, "softmax_lse": Aval((heads, tokens), "float32")}


def finite(inputs: Inputs, name: str) -> float:
    """A number that must be finite."""
    value = inputs[name]
    if not math.isfinite(value):
        raise inputs.value_error(name, value, "a finite number")
    return value


def softcap(inputs: Inputs, name: str) -> float:
    """A cap of the scores; 0 and None: none."""
    value = inputs[name] or 0.0
    if not (math.isfinite(value) and value >= 0):
        raise inputs.value_error(name, value, "a number >= 0 (0: no cap)")
    return value


def window_side(inputs: Inputs, name: str) -> int:
    """A side of a window; -1: unlimited."""
    if inputs[name] < -1:
        raise inputs.value_error(name, inputs[name], "-1 (unlimited) or a number of keys >= 0")
    return min(inputs[name], INT32_MAX)


def flash_attn_scalars(inputs: Inputs) -> dict[str, Any]:
    """The native scalars of flash_attn_varlen_func, and of its gradients; fills in the default scale."""
    if inputs["softmax_scale"] is None:
        inputs.scalars["softmax_scale"] = 1.0 / math.sqrt(inputs.size("D"))
    return {
        "causal": int(inputs["causal"]),
        "window_left": window_side(inputs, "window_left"),
        "window_right": window_side(inputs, "window_right"),
        "max_seqlen_q": int32(inputs["max_seqlen_q"]),
        "max_seqlen_k": int32(inputs["max_seqlen_k"]),
        "softmax_scale": finite(inputs, "softmax_scale"),
        "softcap": softcap(inputs, "softcap"),
    }


@functools.cache
def _always_batch_invariant() -> bool:
    """Whether the environment asks for it, of every call. Read once a process: programs are kept."""
    return os.environ.get("FLASHXLA_BATCH_INVARIANT") == "1"


def batch_invariant(inputs: Inputs) -> int:
    """The native scalar."""
    return int(inputs["batch_invariant"] or _always_batch_invariant())


def int32(value: Any) -> Any:
    """A length, or the largest that the kernels count."""
    return min(value, INT32_MAX)
