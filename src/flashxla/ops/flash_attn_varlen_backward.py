"""Declaration: the gradients of attention over dense keys and values."""

from __future__ import annotations

from collections.abc import Mapping

from flashxla.ops import attention
from flashxla.ops.cache_format import check_same_dtype
from flashxla.ops.op import Aval, Inputs, Op, Resolution
from flashxla.ops.parameters import FLOATS, FP8, Result, Scalar, Tensor


def why_not(tensors: Mapping[str, Aval | None]) -> str:
    """Why a call of flash_attn_varlen_func has no gradients, or ""."""
    if tensors["block_table"] is not None:
        return "its keys are paged (block_table): gradients need dense keys and values"
    for name in ("q", "k", "v"):
        tensor = tensors[name]
        if tensor is not None and tensor.dtype in (*FP8, "uint8"):
            return f"{name} is {tensor.dtype}: gradients need {', '.join(FLOATS)}"
    descales = [name for name in ("q_descale", "k_descale", "v_descale") if tensors[name] is not None]
    return f"it has {descales[0]}, which has no gradient: multiply by it before the call" if descales else ""


def _rule(inputs: Inputs) -> Resolution:
    for name in ("k", "v", "out", "grad_out"):
        check_same_dtype(inputs, name, "q")
    attention.check_heads(inputs, "q", "k")
    return Resolution(
        attributes={
            **attention.flash_attn_scalars(inputs),
            "deterministic": int(inputs["deterministic"]),
        },
        results={f"grad_{name}": inputs[name] for name in ("q", "k", "v", "s_aux")},
    )


FLASH_ATTN_VARLEN_BACKWARD = Op(
    "flash_attn_varlen_backward",
    "attention_backward",
    (
        Tensor("grad_out", "T Hq Dv", FLOATS, "grad_out"),
        Tensor("q", "T Hq D", FLOATS, "q"),
        Tensor("k", "Tk Hk D", FLOATS, "k"),
        Tensor("v", "Tk Hk Dv", FLOATS, "v"),
        Tensor("out", "T Hq Dv", FLOATS, "out"),
        Tensor("softmax_lse", "Hq T", ("float32",), "lse"),
        Tensor("cu_seqlens_q", "S+1", ("int32",), "cu_seqlens_q"),
        Scalar("max_seqlen_q", int),
        Scalar("max_seqlen_k", int),
        Tensor("cu_seqlens_k", "S+1", ("int32",), "cu_seqlens_k"),
        Tensor("grad_softmax_lse", "Hq T", ("float32",), "grad_lse", optional=True),
        Tensor("seqused_k", "S", ("int32",), "seqused_k", optional=True),
        Tensor("num_seqs", "()|1", ("int32",), "num_seqs", optional=True),
        Tensor("leftpad_k", "S", ("int32",), "leftpad_k", optional=True),
        Tensor("alibi_slopes", "Hq|S Hq", ("float32",), "alibi_slopes", optional=True),
        Tensor("s_aux", "Hq", FLOATS, "sinks", optional=True),
        Scalar("softmax_scale", float, None),
        Scalar("causal", bool, False),
        Scalar("window_left", int, -1),
        Scalar("window_right", int, -1),
        Scalar("softcap", float, 0.0),
        Scalar("deterministic", bool, False),
    ),
    _rule,
    results=(
        Result("grad_q", "grad_q", dims="T Hq D"),
        Result("grad_k", "grad_k", dims="Tk Hk D", sums_over="Hq"),
        Result("grad_v", "grad_v", dims="Tk Hk Dv", sums_over="Hq"),
        Result("grad_s_aux", "grad_sinks", when="s_aux", dims="Hq"),
    ),
    caller="flash_attn_varlen_func",
    parallel=(attention.HEADS,),
)
