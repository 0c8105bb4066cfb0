"""Declaration: attention with flash-attention's signature, over dense or paged keys and values."""

from __future__ import annotations

from typing import Any

from flashxla.ops import attention
from flashxla.ops.arguments import window_sides
from flashxla.ops.cache_format import CACHE_DTYPES, PAIR_DIMS, check_pair, check_same_dtype
from flashxla.ops.flash_attn_varlen_backward import FLASH_ATTN_VARLEN_BACKWARD, why_not
from flashxla.ops.op import Inputs, Op, Resolution, Vjp
from flashxla.ops.parameters import FLOATS, FP8, Scalar, Tensor


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    max_seqlen_q: int,
    cu_seqlens_q: Any,
    max_seqlen_k: int,
    cu_seqlens_k: Any = None,
    seqused_k: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | None = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    block_table: Any = None,
    leftpad_k: Any = None,
    s_aux: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    num_seqs: Any = None,
    return_softmax_lse: bool = False,
    *,
    layout: str = "NHD",
    kv_cache_dtype: str = "auto",
    deterministic: bool = False,
    batch_invariant: bool = False,
) -> Any:
    """Softmax attention over a ragged batch, with dense or paged keys and values.

    Args:
        q: [T, Hq, D], float32, float16, bfloat16 or float8; D <= 576.
        k, v: dense [Tk, Hk, D] and [Tk, Hk, Dv], or with block_table paged [P, B, Hk, D] (layout "NHD") or
            [P, Hk, B, D] ("HND"), Dv for v; Dv <= 512. Of q's dtype, a float8, or uint8 with kv_cache_dtype naming
            the format.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths, part of the compiled program.
        cu_seqlens_q: int32 [S+1], offsets of the sequences in q.
        cu_seqlens_k: int32 [S+1], offsets in dense k and v.
        seqused_k: int32 [S], lengths of the keys; needed with block_table, else overrides cu_seqlens_k's lengths.
        softmax_scale: None is 1 / sqrt(D).
        causal: mask aligned to the bottom right: query i sees keys up to i + len_k - len_q.
        window_size: (left, right) keys around that diagonal; -1 is unlimited.
        softcap: softcap * tanh(score / softcap) if > 0.
        alibi_slopes: float32 [Hq] or [S, Hq]; adds -slope * |i + len_k - len_q - j| after the softcap.
        block_table: int32 [S, M], the pages of each sequence.
        leftpad_k: int32 [S], how many first keys to mask; the alignment stays.
        s_aux: [Hq] attention sinks: exp(s_aux) joins the softmax's denominator.
        q_descale, k_descale, v_descale: float32, one element, [Hk] or [S, Hk]; factors of q, k and v.
        num_seqs: int32 [1]: only the first num_seqs sequences are real.
        return_softmax_lse: also return the log of the softmax's denominator.
        layout: of paged keys and values.
        kv_cache_dtype: "auto", "fp8" = "fp8_e4m3" or "fp8_e5m2".
        deterministic: gradients are the same bits for the same input each time. On a CPU they always are; on a GPU
            the fastest kernel adds up those of q in any order.
        batch_invariant: the bits of a row of out and of the LSE depend on its query and the keys that it sees alone,
            not on what else is in the batch or how a prompt is cut. FLASHXLA_BATCH_INVARIANT=1 means all calls.

    Returns:
        out [T, Hq, Dv] in q's dtype (bfloat16 for a float8 q); with return_softmax_lse also the natural-log LSE,
        float32 [Hq, T]. Tokens outside every sequence: out 0, LSE -inf.

    Gradients: of q, k, v and s_aux, through out and the LSE, for dense keys; alibi_slopes get none.

    Raises:
        TypeError, ValueError: wrong dtypes or shapes.
        NotImplementedError: when a gradient is computed that there is none of.

    Semantics of flash-attention's flash_attn_varlen_func.
    """
    left, right = window_sides("flash_attn_varlen_func", window_size)
    return (
        q,
        k,
        v,
        cu_seqlens_q,
        max_seqlen_q,
        max_seqlen_k,
        cu_seqlens_k,
        seqused_k,
        block_table,
        num_seqs,
        leftpad_k,
        alibi_slopes,
        s_aux,
        q_descale,
        k_descale,
        v_descale,
        softmax_scale,
        causal,
        left,
        right,
        softcap,
        return_softmax_lse,
        layout,
        kv_cache_dtype,
        deterministic,
        batch_invariant,
    )


def _rule(inputs: Inputs) -> Resolution:
    layout = inputs.choice("layout", tuple(PAIR_DIMS))
    if inputs["block_table"] is not None:
        check_pair(inputs, "k", "v", layout)
        if inputs["seqused_k"] is None:
            raise inputs.type_error("seqused_k", "None", "an int32 tensor [S]: block_table needs the lengths")
        if inputs["cu_seqlens_k"] is not None:
            raise inputs.value_error(
                "cu_seqlens_k", "a tensor beside block_table", "None: paged keys are found by block_table"
            )
    else:
        inputs.check_dims("k", "Tk Hk D")
        inputs.check_dims("v", "Tk Hk Dv")
        check_same_dtype(inputs, "v", "k")
        if inputs["cu_seqlens_k"] is None:
            raise inputs.type_error(
                "cu_seqlens_k", "None", "an int32 tensor [S+1], or block_table and seqused_k for paged keys"
            )
    for name in ("q_descale", "k_descale", "v_descale"):
        inputs.check_dims(name, attention.DESCALE)
    element = attention.check_query(inputs, "q", "k")
    for name in ("max_seqlen_q", "max_seqlen_k"):
        if inputs[name] < 0:
            raise inputs.value_error(name, inputs[name], "a number of tokens >= 0")
    return Resolution(
        attributes={
            "layout": layout,
            "kv_dtype": element,
            "batch_invariant": attention.batch_invariant(inputs),
            **attention.flash_attn_scalars(inputs),
        },
        results=attention.results(inputs, "q"),
    )


FLASH_ATTN_VARLEN = Op(
    "flash_attn_varlen",
    "attention",
    (
        Tensor("q", "T Hq D", (*FLOATS, *FP8), "q"),
        Tensor("k", "", CACHE_DTYPES, "k"),
        Tensor("v", "", CACHE_DTYPES, "v"),
        Tensor("cu_seqlens_q", "S+1", ("int32",), "cu_seqlens_q"),
        Scalar("max_seqlen_q", int),
        Scalar("max_seqlen_k", int),
        Tensor("cu_seqlens_k", "S+1", ("int32",), "cu_seqlens_k", optional=True),
        Tensor("seqused_k", "S", ("int32",), "seqused_k", optional=True),
        Tensor("block_table", "S M", ("int32",), "block_table", optional=True),
        Tensor("num_seqs", "()|1", ("int32",), "num_seqs", optional=True),
        Tensor("leftpad_k", "S", ("int32",), "leftpad_k", optional=True),
        Tensor("alibi_slopes", "Hq|S Hq", ("float32",), "alibi_slopes", optional=True),
        Tensor("s_aux", "Hq", FLOATS, "sinks", optional=True),
        Tensor("q_descale", "", ("float32",), "q_descale", optional=True),
        Tensor("k_descale", "", ("float32",), "k_descale", optional=True),
        Tensor("v_descale", "", ("float32",), "v_descale", optional=True),
        Scalar("softmax_scale", float, None),
        Scalar("causal", bool, False),
        Scalar("window_left", int, -1),
        Scalar("window_right", int, -1),
        Scalar("softcap", float, 0.0),
        Scalar("return_softmax_lse", bool, False),
        Scalar("layout", str, "NHD"),
        Scalar("kv_cache_dtype", str, "auto"),
        Scalar("deterministic", bool, False),  # of the gradients
        Scalar("batch_invariant", bool, False),
    ),
    _rule,
    results=attention.RESULTS,
    public=flash_attn_varlen_func,
    parallel=(attention.HEADS,),
    vjp=Vjp(
        FLASH_ATTN_VARLEN_BACKWARD,
        residuals=(
            "q",
            "k",
            "v",
            "out",
            "softmax_lse",
            "cu_seqlens_q",
            "cu_seqlens_k",
            "seqused_k",
            "num_seqs",
            "leftpad_k",
            "alibi_slopes",
            "s_aux",
        ),
        why_not=why_not,
    ),
)
