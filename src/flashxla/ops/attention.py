"""Declarations: softmax attention over ragged batches, with dense or paged keys and values."""

from __future__ import annotations

import math

from flashxla.ops.cache_format import (
    CACHE_DTYPES,
    DTYPE_CODES,
    LAYOUT_CODES,
    ONE_TENSOR_DIMS,
    PAIR_DIMS,
    check_same_dtype,
    element_dtype,
)
from flashxla.ops.op import FLOATS, FP8, Aval, Inputs, Native, Op, Resolution, Scalar, Tensor

MAX_HEAD_SIZE = 256
_INT32_MAX = 2**31 - 1

ATTENTION = Native(
    "attention",
    inputs=(
        "q",
        "k",
        "v",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "seqused_k",
        "leftpad_k",
        "block_table",
        "num_seqs",
        "alibi_slopes",
        "sinks",
        "q_descale",
        "k_descale",
        "v_descale",
        "plan",  # cuda
    ),
    results=("out", "lse", "workspace"),  # workspace: cuda
    integers=(
        "layout",
        "kv_dtype",
        "causal",
        "window_left",
        "window_right",
        "max_seqlen_q",
        "max_seqlen_k",
        "engines",  # cuda: set where a plan is given
    ),
    floats=("softmax_scale", "softcap"),
)

# The work lists of attention on a GPU, from its index tensors. Layers that share those share the plan.
ATTENTION_PLAN = Native(
    "attention_plan",
    inputs=("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k", "block_table", "num_seqs"),
    results=("plan",),
    integers=(
        "engines",
        "num_tokens",
        "num_heads",
        "num_kv_heads",
        "num_blocks",
        "block_size",
        "causal",
        "window_left",
        "window_right",
    ),
)

_DESCALE = "()|1|Hk|S Hk"


def _check_query(inputs: Inputs, query: str, key: str) -> str:
    """Checks that hold for every attention op. Returns the dtype of a K/V element."""
    if inputs.size("D") > MAX_HEAD_SIZE or inputs.size("D") < 1:
        raise inputs.value_error(query, f"head size {inputs.size('D')}", f"1 to {MAX_HEAD_SIZE}")
    if inputs.size("Hk") < 1 or inputs.size("Hq") % inputs.size("Hk") != 0:
        raise inputs.value_error(
            query,
            f"{inputs.size('Hq')} heads",
            f"a multiple of the {inputs.size('Hk')} heads of {inputs.label(key)}",
        )
    element = element_dtype(inputs, key)
    q_dtype = inputs[query].dtype
    accepted = FP8 if q_dtype in FP8 else (q_dtype, *FP8)
    if element not in accepted:
        raise inputs.type_error(key, f"dtype {element}", f"{', '.join(accepted)} with a {q_dtype} {query}")
    return element


def _results(inputs: Inputs, query: str, lse: bool) -> tuple[Aval, ...]:
    q = inputs[query]
    out = Aval(q.shape, "bfloat16" if q.dtype in FP8 else q.dtype)
    return (out, Aval((q.shape[1], q.shape[0]), "float32")) if lse else (out,)


def _check_finite(inputs: Inputs, name: str) -> float:
    value = inputs[name]
    if not math.isfinite(value):
        raise inputs.value_error(name, value, "a finite number")
    return value


def _check_softcap(inputs: Inputs, name: str) -> float:
    value = inputs[name] or 0.0
    if not (math.isfinite(value) and value >= 0):
        raise inputs.value_error(name, value, "a number >= 0 (0: no cap)")
    return value


def _check_window(inputs: Inputs, name: str) -> int:
    if inputs[name] < -1:
        raise inputs.value_error(name, inputs[name], "-1 (unlimited) or a number of keys >= 0")
    return min(inputs[name], _INT32_MAX)


def _flash_attn_varlen(inputs: Inputs) -> Resolution:
    layout = inputs.choice("layout", tuple(PAIR_DIMS))
    if inputs["block_table"] is not None:
        inputs.check_dims("k", PAIR_DIMS[layout])
        inputs.check_dims("v", PAIR_DIMS[layout])
        if inputs["seqused_k"] is None:
            raise inputs.type_error("seqused_k", "None", "an int32 tensor [S]: block_table needs the lengths")
        if inputs["cu_seqlens_k"] is not None:
            raise inputs.value_error(
                "cu_seqlens_k", "a tensor beside block_table", "None: paged keys are found by block_table"
            )
    else:
        inputs.check_dims("k", "Tk Hk D")
        inputs.check_dims("v", "Tk Hk D")
        if inputs["cu_seqlens_k"] is None:
            raise inputs.type_error(
                "cu_seqlens_k", "None", "an int32 tensor [S+1], or block_table and seqused_k for paged keys"
            )
    for name in ("q_descale", "k_descale", "v_descale"):
        inputs.check_dims(name, _DESCALE)
    check_same_dtype(inputs, "v", "k")
    element = _check_query(inputs, "q", "k")
    for name in ("max_seqlen_q", "max_seqlen_k"):
        if inputs[name] < 0:
            raise inputs.value_error(name, inputs[name], "a number of tokens >= 0")
    if inputs["softmax_scale"] is None:
        inputs.scalars["softmax_scale"] = 1.0 / math.sqrt(inputs.size("D"))
    return Resolution(
        attributes={
            "layout": LAYOUT_CODES[layout],
            "kv_dtype": DTYPE_CODES[element],
            "causal": int(inputs["causal"]),
            "window_left": _check_window(inputs, "window_left"),
            "window_right": _check_window(inputs, "window_right"),
            "max_seqlen_q": min(inputs["max_seqlen_q"], _INT32_MAX),
            "max_seqlen_k": min(inputs["max_seqlen_k"], _INT32_MAX),
            "engines": 0,
            "softmax_scale": _check_finite(inputs, "softmax_scale"),
            "softcap": _check_softcap(inputs, "softcap"),
        },
        results=_results(inputs, "q", inputs["return_softmax_lse"]),
    )


def _paged_attention(inputs: Inputs) -> Resolution:
    if inputs["value_cache"] is not None:
        layout = inputs.choice("layout", tuple(PAIR_DIMS))
        inputs.check_dims("kv_cache", PAIR_DIMS[layout])
        inputs.check_dims("value_cache", PAIR_DIMS[layout])
        check_same_dtype(inputs, "value_cache", "kv_cache")
    else:
        layout = inputs.choice("layout", tuple(ONE_TENSOR_DIMS))
        inputs.check_dims("kv_cache", ONE_TENSOR_DIMS[layout])
    for name in ("k_scale", "v_scale"):
        inputs.check_dims(name, _DESCALE)
    element = _check_query(inputs, "query", "kv_cache")
    window = inputs["sliding_window"]
    if window is not None and window < 1:
        raise inputs.value_error("sliding_window", window, "None or a number of keys >= 1")
    capacity = inputs["block_tables"].shape[1] * inputs.size("B")
    return Resolution(
        attributes={
            "layout": LAYOUT_CODES[layout],
            "kv_dtype": DTYPE_CODES[element],
            "causal": 1,
            "window_left": -1 if window is None else min(window - 1, _INT32_MAX),
            "window_right": 0,
            "max_seqlen_q": min(inputs["query"].shape[0], _INT32_MAX),
            "max_seqlen_k": min(capacity, _INT32_MAX),
            "engines": 0,
            "softmax_scale": _check_finite(inputs, "scale"),
            "softcap": _check_softcap(inputs, "soft_cap"),
        },
        results=_results(inputs, "query", lse=False),
    )


FLASH_ATTN_VARLEN = Op(
    "flash_attn_varlen",
    ATTENTION,
    (
        Tensor("q", "T Hq D", (*FLOATS, *FP8), slot="q"),
        Tensor("k", "", CACHE_DTYPES, slot="k"),
        Tensor("v", "", CACHE_DTYPES, slot="v"),
        Tensor("cu_seqlens_q", "S+1", ("int32",), slot="cu_seqlens_q"),
        Scalar("max_seqlen_q", int),
        Scalar("max_seqlen_k", int),
        Tensor("cu_seqlens_k", "S+1", ("int32",), slot="cu_seqlens_k", optional=True),
        Tensor("seqused_k", "S", ("int32",), slot="seqused_k", optional=True),
        Tensor("block_table", "S M", ("int32",), slot="block_table", optional=True),
        Tensor("num_seqs", "()|1", ("int32",), slot="num_seqs", optional=True),
        Tensor("leftpad_k", "S", ("int32",), slot="leftpad_k", optional=True),
        Tensor("alibi_slopes", "Hq|S Hq", ("float32",), slot="alibi_slopes", optional=True),
        Tensor("s_aux", "Hq", FLOATS, slot="sinks", optional=True),
        Tensor("q_descale", "", ("float32",), slot="q_descale", optional=True),
        Tensor("k_descale", "", ("float32",), slot="k_descale", optional=True),
        Tensor("v_descale", "", ("float32",), slot="v_descale", optional=True),
        Scalar("softmax_scale", float, None),
        Scalar("causal", bool, False),
        Scalar("window_left", int, -1),
        Scalar("window_right", int, -1),
        Scalar("softcap", float, 0.0),
        Scalar("return_softmax_lse", bool, False),
        Scalar("layout", str, "NHD"),
        Scalar("kv_cache_dtype", str, "auto"),
    ),
    _flash_attn_varlen,
    result_names=("out", "softmax_lse"),
    public_name="flash_attn_varlen_func",
)

PAGED_ATTENTION = Op(
    "paged_attention",
    ATTENTION,
    (
        Tensor("query", "T Hq D", (*FLOATS, *FP8), slot="q"),
        Tensor("kv_cache", "", CACHE_DTYPES, slot="k", named_beside=("key_cache", "value_cache")),
        Tensor("context_lens", "S", ("int32",), slot="seqused_k"),
        Tensor("block_tables", "S M", ("int32",), slot="block_table"),
        Tensor("query_start_loc", "S+1", ("int32",), slot="cu_seqlens_q"),
        Tensor("num_seqs", "()|1", ("int32",), slot="num_seqs"),
        Scalar("scale", float),
        Scalar("sliding_window", int, None),
        Scalar("soft_cap", float, None),
        Tensor("k_scale", "", ("float32",), slot="k_descale", optional=True),
        Tensor("v_scale", "", ("float32",), slot="v_descale", optional=True),
        Tensor("value_cache", "", CACHE_DTYPES, slot="v", optional=True),
        Scalar("layout", str, "interleaved"),
        Scalar("kv_cache_dtype", str, "auto"),
    ),
    _paged_attention,
    result_names=("out",),
)
