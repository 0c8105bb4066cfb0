"""Wrong calls raise at trace time, and say: the operation, the argument, what it got, what it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.frontends import Frontend

F32, F16, BF16, U8, I32, I64 = np.float32, np.float16, ml_dtypes.bfloat16, np.uint8, np.int32, np.int64
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def t(*shape: int, dtype: Any = F32) -> np.ndarray:
    return np.zeros(shape, dtype)


Arguments = dict[str, Any]

WRITE: Arguments = {
    "key": t(5, 2, 16),
    "value": t(5, 2, 16),
    "key_cache": t(4, 8, 2, 16),
    "value_cache": t(4, 8, 2, 16),
    "slot_mapping": t(5, dtype=I64),
}
WRITE_ONE: Arguments = {
    "key": t(5, 2, 16),
    "value": t(5, 2, 16),
    "kv_cache": t(4, 8, 4, 16),
    "slot_mapping": t(5, dtype=I32),
    "layout": "interleaved",
}
DENSE: Arguments = {
    "q": t(6, 4, 16),
    "k": t(9, 2, 16),
    "v": t(9, 2, 16),
    "max_seqlen_q": 6,
    "cu_seqlens_q": t(3, dtype=I32),
    "max_seqlen_k": 9,
    "cu_seqlens_k": t(3, dtype=I32),
}
PAGED: Arguments = {
    "q": t(6, 4, 16),
    "k": t(4, 8, 2, 16),
    "v": t(4, 8, 2, 16),
    "max_seqlen_q": 6,
    "cu_seqlens_q": t(3, dtype=I32),
    "max_seqlen_k": 9,
    "seqused_k": t(2, dtype=I32),
    "block_table": t(2, 3, dtype=I32),
}
RAGGED: Arguments = {
    "query": t(6, 4, 16),
    "kv_cache": t(4, 8, 4, 16),
    "context_lens": t(2, dtype=I32),
    "block_tables": t(2, 3, dtype=I32),
    "query_start_loc": t(3, dtype=I32),
    "num_seqs": t(1, dtype=I32),
    "scale": 0.25,
}
PAIR = RAGGED | {"kv_cache": (t(4, 8, 2, 16), t(4, 8, 2, 16))}
NEW = {"key": t(6, 2, 16), "value": t(6, 2, 16)}
QKV = {"qkv": t(6, 8, 16)} | {name: x for name, x in RAGGED.items() if name != "query"}
MERGE: Arguments = {"out_a": t(5, 4, 16), "lse_a": t(4, 5), "out_b": t(5, 4, 16), "lse_b": t(4, 5)}

CALLS: dict[str, tuple[str, Arguments]] = {
    "write": ("reshape_and_cache_flash", WRITE),
    "write_one": ("reshape_and_cache", WRITE_ONE),
    "dense": ("flash_attn_varlen_func", DENSE),
    "paged": ("flash_attn_varlen_func", PAGED),
    "ragged": ("paged_attention", RAGGED),
    "pair": ("paged_attention", PAIR),
    "merge": ("merge_attn_states", MERGE),
    "fused": ("ragged_paged_attention", RAGGED | NEW),
    "fused_pair": ("ragged_paged_attention", PAIR | NEW),
    "packed": ("ragged_paged_attention_qkvpacked", QKV),
    "packed_pair": ("ragged_paged_attention_qkvpacked", QKV | {"kv_cache": PAIR["kv_cache"]}),
}
# Functions that are no operations, but make calls of one.
FORMS: dict[str, tuple[str, Arguments]] = {
    "equal": ("flash_attn_func", {"q": t(2, 3, 4, 16), "k": t(2, 3, 2, 16), "v": t(2, 3, 2, 16)}),
    "equal_packed": ("flash_attn_qkvpacked_func", {"qkv": t(2, 5, 3, 2, 16)}),
}
ALL = CALLS | FORMS
BIG = {"q": t(6, 4, 577), "k": t(9, 2, 577)}
FP8_CACHES = {n: t(4, 8, 2, 16, dtype=U8) for n in ("key_cache", "value_cache")} | {"kv_cache_dtype": "fp8"}

# call, what changes, the error, the argument that it names, what it got, what it takes
ERRORS = [
    (
        "packed",
        {"qkv": t(6, 3, 16)},
        ValueError,
        "qkv",
        "3 heads",
        "query heads and 2 * 2, those of kv_cache",
    ),
    ("packed", {"qkv": t(6, 7, 16)}, ValueError, "qkv", "3 heads", "a multiple of the 2 heads"),
    ("packed", {"qkv": t(6, 8, 15)}, ValueError, "kv_cache", "[4, 8, 4, 16]", "D = 15 by qkv"),
    ("packed", {"qkv": t(6, 128)}, ValueError, "qkv", "[6, 128]", "[T, Hqkv, D]"),
    ("packed", {"qkv": t(6, 8, 16, dtype=I32)}, TypeError, "qkv", "int32", "float32"),
    ("packed", {"qkv": t(6, 8, 16, dtype=BF16)}, TypeError, "kv_cache", "float32", "bfloat16"),
    ("packed", {"s_aux": t(3)}, ValueError, "qkv", "8 heads", "the 3 of s_aux and 2 * 2"),
    ("packed", {"slot_mapping": t(7, dtype=I32)}, ValueError, "slot_mapping", "7 slots", "6 tokens of qkv"),
    (
        "packed_pair",
        {"kv_cache": (t(4, 8, 2, 16), t(4, 8, 2, 12))},
        ValueError,
        "value_cache",
        "head size 12",
        "16, that of qkv",
    ),
    ("write", {"key": t(5, 2, 16, dtype=I32)}, TypeError, "key", "int32", "float32, float16, bfloat16"),
    ("write", {"value": t(5, 2, 16, dtype=F16)}, TypeError, "value", "float16", "float32"),
    ("write", {"value": t(4, 2, 16)}, ValueError, "value", "[4, 2, 16]", "N = 5"),
    ("write", {"key": t(5, 32)}, ValueError, "key", "[5, 32]", "[N, Hk, D]"),
    ("write", {"key_cache": t(4, 8, 3, 16)}, ValueError, "key_cache", "[4, 8, 3, 16]", "Hk = 2 by key"),
    ("write", {"value_cache": t(5, 8, 2, 16)}, ValueError, "value_cache", "[5, 8, 2, 16]", "P = 4"),
    ("write", {"value_cache": t(4, 8, 2, 16, dtype=U8)}, TypeError, "value_cache", "uint8", "float32"),
    ("write", {"layout": "HND"}, ValueError, "key_cache", "[4, 8, 2, 16]", "[P, Hk, B, D]"),
    ("write", {"layout": "interleaved"}, ValueError, "layout", "'interleaved'", "'NHD', 'HND'"),
    ("write", {"slot_mapping": t(5)}, TypeError, "slot_mapping", "float32", "int32, int64"),
    ("write", {"slot_mapping": t(5, 1, dtype=I32)}, ValueError, "slot_mapping", "[5, 1]", "[T]"),
    (
        "write",
        {"slot_mapping": t(6, dtype=I32)},
        ValueError,
        "slot_mapping",
        "6 slots",
        "at most the 5 tokens",
    ),
    ("write", {"kv_cache_dtype": "int8"}, ValueError, "kv_cache_dtype", "'int8'", "'fp8_e5m2'"),
    ("write", {"kv_cache_dtype": "fp8"}, TypeError, "key_cache", "float32", "uint8 or float8_e4m3fn"),
    (
        "write",
        {n: t(4, 8, 2, 16, dtype=U8) for n in ("key_cache", "value_cache")},
        ValueError,
        "kv_cache_dtype",
        "'auto' for a uint8 key_cache",
        "fp8_e4m3",
    ),
    (
        "write",
        {n: t(4, 8, 2, 16, dtype=E5M2) for n in ("key_cache", "value_cache")} | {"kv_cache_dtype": "fp8"},
        TypeError,
        "key_cache",
        "float8_e5m2",
        "uint8 or float8_e4m3fn",
    ),
    (
        "write",
        {n: t(4, 8, 2, 16, dtype=BF16) for n in ("key_cache", "value_cache")},
        TypeError,
        "key_cache",
        "bfloat16",
        "float32",
    ),
    ("write", {"k_scale": t(3)}, ValueError, "k_scale", "[3]", "[1] or [Hk]"),
    ("write", {"v_scale": t(2, dtype=F16)}, TypeError, "v_scale", "float16", "float32"),
    ("write", {"value": t(5, 2, 8)}, ValueError, "value_cache", "[4, 8, 2, 16]", "Dv = 8 by value"),
    ("write", {n: t(5, 2, 16, dtype=E4M3) for n in NEW}, TypeError, "key_cache", "float32", "float8_e4m3fn"),
    (
        "write",
        FP8_CACHES | {n: t(5, 2, 16, dtype=E5M2) for n in NEW},
        TypeError,
        "key",
        "float8_e5m2",
        "bfloat16, float8_e4m3fn with a cache of float8_e4m3fn",
    ),
    ("write", FP8_CACHES | {"key": t(5, 2, 16, dtype=U8)}, TypeError, "key", "uint8", "float8_e5m2"),
    ("write_one", {"value": t(5, 2, 8)}, ValueError, "value", "[5, 2, 8]", "D = 16 by key"),
    ("write_one", {"layout": "NHD"}, ValueError, "layout", "'NHD'", "'interleaved'"),
    ("write_one", {"layout": "stacked"}, ValueError, "kv_cache", "[4, 8, 4, 16]", "[2, P, B, Hk, D]"),
    ("write_one", {"kv_cache": t(4, 8, 5, 16)}, ValueError, "kv_cache", "[4, 8, 5, 16]", "2*Hk"),
    ("write_one", {"kv_cache": t(4, 8, 4, 16, dtype=F16)}, TypeError, "kv_cache", "float16", "float32"),
    ("dense", BIG, ValueError, "q", "head size 577", "1 to 576"),
    ("dense", {"v": t(9, 2, 513)}, ValueError, "v", "head size 513", "1 to 512"),
    ("dense", {"q": t(6, 4, 0), "k": t(9, 2, 0)}, ValueError, "q", "head size 0", "1 to 576"),
    ("dense", {"v": t(9, 2, 0)}, ValueError, "v", "head size 0", "1 to 512"),
    ("dense", {"q": t(6, 3, 16)}, ValueError, "q", "3 heads", "a multiple of the 2 heads"),
    ("dense", {"q": t(6, 4, 16, dtype=F16)}, TypeError, "k", "float32", "float16"),
    ("dense", {"q": t(6, 4, 16, dtype=I32)}, TypeError, "q", "int32", "float32, float16, bfloat16"),
    ("dense", {"k": t(9, 2, 8)}, ValueError, "k", "[9, 2, 8]", "D = 16 by q"),
    ("dense", {"v": t(8, 2, 16)}, ValueError, "v", "[8, 2, 16]", "Tk = 9 by k"),
    ("dense", {"v": t(9, 2, 16, dtype=E4M3)}, TypeError, "v", "float8_e4m3fn", "float32"),
    ("dense", {"cu_seqlens_q": t(3, dtype=I64)}, TypeError, "cu_seqlens_q", "int64", "int32"),
    ("dense", {"cu_seqlens_q": t(0, dtype=I32)}, ValueError, "cu_seqlens_q", "[0]", "[S+1]"),
    ("dense", {"cu_seqlens_k": t(4, dtype=I32)}, ValueError, "cu_seqlens_k", "[4]", "S = 2"),
    ("dense", {"cu_seqlens_k": None}, TypeError, "cu_seqlens_k", "None", "block_table"),
    ("dense", {"seqused_k": t(3, dtype=I32)}, ValueError, "seqused_k", "[3]", "S = 2"),
    ("dense", {"leftpad_k": t(2)}, TypeError, "leftpad_k", "float32", "int32"),
    ("dense", {"num_seqs": t(2, dtype=I32)}, ValueError, "num_seqs", "[2]", "[1]"),
    ("dense", {"alibi_slopes": t(2)}, ValueError, "alibi_slopes", "[2]", "[Hq] or [S, Hq]"),
    ("dense", {"s_aux": t(3)}, ValueError, "s_aux", "[3]", "Hq = 4"),
    ("dense", {"k_descale": t(2, 4)}, ValueError, "k_descale", "[2, 4]", "[S, Hk]"),
    ("dense", {"window_size": (1, 2, 3)}, ValueError, "window_size", "(1, 2, 3)", "a pair (left, right)"),
    ("dense", {"window_size": ()}, ValueError, "window_size", "()", "a pair (left, right)"),
    ("dense", {"window_size": 4}, TypeError, "window_size", "4 (int)", "a pair (left, right)"),
    ("dense", {"window_size": ("4", 0)}, TypeError, "window_size", "('4', 0)", "a pair (left, right)"),
    ("dense", {"window_size": (3.5, 0)}, TypeError, "window_size", "(3.5, 0)", "a pair (left, right)"),
    ("dense", {"window_size": (-2, 0)}, ValueError, "window_size", "(-2, 0)", "-1 or None: unlimited"),
    ("dense", {"window_size": (0, -3)}, ValueError, "window_size", "(0, -3)", "-1 or None: unlimited"),
    ("dense", {"softcap": -1.0}, ValueError, "softcap", "-1.0", ">= 0"),
    ("dense", {"softcap": float("nan")}, ValueError, "softcap", "nan", ">= 0"),
    ("dense", {"softmax_scale": float("inf")}, ValueError, "softmax_scale", "inf", "finite"),
    ("dense", {"max_seqlen_q": -1}, ValueError, "max_seqlen_q", "-1", ">= 0"),
    ("dense", {"max_seqlen_k": -5}, ValueError, "max_seqlen_k", "-5", ">= 0"),
    ("dense", {"layout": None}, TypeError, "layout", "None (NoneType)", "str"),
    ("dense", {"causal": None}, TypeError, "causal", "None (NoneType)", "bool"),
    ("dense", {"max_seqlen_q": 6.0}, TypeError, "max_seqlen_q", "6.0 (float)", "int"),
    ("dense", {"max_seqlen_k": "9"}, TypeError, "max_seqlen_k", "'9' (str)", "int"),
    ("dense", {"softmax_scale": "1"}, TypeError, "softmax_scale", "'1' (str)", "float or None"),
    ("dense", {"q": None}, TypeError, "q", "None", "float32, float16, bfloat16"),
    ("dense", {"q": "text"}, TypeError, "q", "'text' (str)", "float32, float16, bfloat16"),
    ("dense", {"k": None}, TypeError, "k", "None", "float32, float16, bfloat16"),
    ("dense", {"cu_seqlens_q": None}, TypeError, "cu_seqlens_q", "None", "int32"),
    ("paged", {"seqused_k": None}, TypeError, "seqused_k", "None", "block_table"),
    ("paged", {"cu_seqlens_k": t(3, dtype=I32)}, ValueError, "cu_seqlens_k", "block_table", "None"),
    ("paged", {"layout": "packed_HND"}, ValueError, "layout", "'packed_HND'", "'NHD', 'HND'"),
    ("paged", {"layout": "HND"}, ValueError, "q", "4 heads", "a multiple of the 8 heads of k"),
    ("paged", {"block_table": t(3, 3, dtype=I32)}, ValueError, "block_table", "[3, 3]", "S = 2"),
    ("paged", {"block_table": t(2, 3, dtype=I64)}, TypeError, "block_table", "int64", "int32"),
    ("paged", {"k": t(9, 2, 16)}, ValueError, "k", "[9, 2, 16]", "[P, B, Hk, D]"),
    ("paged", {"kv_cache_dtype": "fp8_e5m2"}, TypeError, "k", "float32", "uint8 or float8_e5m2"),
    (
        "paged",
        {n: t(4, 8, 2, 16, dtype=U8) for n in "kv"},
        ValueError,
        "kv_cache_dtype",
        "'auto'",
        "fp8_e4m3",
    ),
    ("paged", {"q": t(6, 4, 16, dtype=E4M3)}, TypeError, "k", "float32", "float8_e4m3fn, float8_e5m2"),
    ("ragged", {"layout": "NHD"}, ValueError, "layout", "'NHD'", "'interleaved'"),
    ("ragged", {"kv_cache": t(4, 8, 3, 16)}, ValueError, "kv_cache", "[4, 8, 3, 16]", "[P, B, 2*Hk, D]"),
    ("ragged", {"query": t(6, 5, 16)}, ValueError, "query", "5 heads", "a multiple of the 2 heads"),
    ("ragged", {"query": t(6, 4, 16, dtype=BF16)}, TypeError, "kv_cache", "float32", "bfloat16"),
    (
        "ragged",
        {"context_lens": t(3, dtype=I32)},
        ValueError,
        "block_tables",
        "[2, 3]",
        "S = 3 by context_lens",
    ),
    ("ragged", {"query_start_loc": t(2, dtype=I32)}, ValueError, "query_start_loc", "[2]", "S = 2"),
    ("ragged", {"num_seqs": t(1)}, TypeError, "num_seqs", "float32", "int32"),
    ("ragged", {"sliding_window": 0}, ValueError, "sliding_window", "0", ">= 1"),
    ("ragged", {"soft_cap": -2.0}, ValueError, "soft_cap", "-2.0", ">= 0"),
    ("ragged", {"scale": float("nan")}, ValueError, "scale", "nan", "finite"),
    ("ragged", {"k_scale": t(3)}, ValueError, "k_scale", "[3]", "[Hk]"),
    (
        "ragged",
        {"kv_cache": (t(4, 8, 2, 16), t(4, 8, 2, 16, dtype=F16))},
        TypeError,
        "value_cache",
        "float16",
        "float32",
    ),
    ("ragged", {"s_aux": t(3)}, ValueError, "s_aux", "[3]", "Hq = 4"),
    ("ragged", {"alibi_slopes": t(4, dtype=F16)}, TypeError, "alibi_slopes", "float16", "float32"),
    ("ragged", {"alibi_slopes": t(3, 4)}, ValueError, "alibi_slopes", "[3, 4]", "[Hq] or [S, Hq]"),
    ("ragged", {"causal": None}, TypeError, "causal", "None (NoneType)", "bool"),
    ("ragged", {"return_softmax_lse": 2.5}, TypeError, "return_softmax_lse", "2.5 (float)", "bool"),
    ("ragged", {"max_seqlen_q": -1}, ValueError, "max_seqlen_q", "-1", "None or a number of tokens >= 0"),
    ("fused", {"max_seqlen_q": 1.0}, TypeError, "max_seqlen_q", "1.0 (float)", "int"),
    ("ragged", {"window_size": 4}, TypeError, "window_size", "4 (int)", "a pair (left, right)"),
    ("ragged", {"window_size": (1,)}, ValueError, "window_size", "(1,)", "a pair (left, right)"),
    ("ragged", {"window_size": (-2, 0)}, ValueError, "window_size", "(-2, 0)", "-1 or None: unlimited"),
    ("fused", {"window_size": (0, "3")}, TypeError, "window_size", "(0, '3')", "a pair (left, right)"),
    ("packed", {"window_size": (3.5, 0)}, TypeError, "window_size", "(3.5, 0)", "a pair (left, right)"),
    ("equal", {"window_size": (3.5, 0)}, TypeError, "window_size", "(3.5, 0)", "a pair (left, right)"),
    ("equal", {"window_size": (0, -2)}, ValueError, "window_size", "(0, -2)", "a pair (left, right)"),
    ("equal_packed", {"window_size": (None, "0")}, TypeError, "window_size", "(None, '0')", "a pair"),
    (
        "equal",
        {"q": t(2, 3, 0, 16), "k": t(2, 3, 0, 16), "v": t(2, 3, 0, 16)},
        ValueError,
        "q",
        "0 heads",
        "a multiple of the 0",
    ),
    ("equal", {"q": t(2, 3, 4, 0), "k": t(2, 3, 2, 0)}, ValueError, "q", "head size 0", "1 to 576"),
    ("equal", {"v": t(2, 3, 2, 0)}, ValueError, "v", "head size 0", "1 to 512"),
    ("equal_packed", {"qkv": t(2, 5, 3, 2, 0)}, ValueError, "qkv", "head size 0", "1 to 576"),
    ("packed", {"qkv": t(6, 4, 16)}, ValueError, "qkv", "4 heads", "query heads and 2 * 2"),
    ("packed", {"qkv": t(6, 4, 16), "s_aux": t(0)}, ValueError, "qkv", "4 heads", "the 0 of s_aux and 2 * 2"),
    (
        "ragged",
        {"kv_cache": {"k": t(4, 8, 2, 16), "v": t(4, 8, 2, 16)}},
        TypeError,
        "kv_cache",
        "dict",
        "float32",
    ),
    ("fused", {"kv_cache": {}}, TypeError, "kv_cache", "dict", "float32"),
    ("packed", {"kv_cache": {"k": 1, "v": 2}}, TypeError, "kv_cache", "dict", "float32"),
    (
        "ragged",
        {"kv_cache": [[[1], [1, 2]], [1]]},
        TypeError,
        "key_cache",
        "[[1], [1, 2]] (list)",
        "float32",
    ),
    (
        "ragged",
        {"window_size": (2, 0), "sliding_window": 3},
        ValueError,
        "window_size",
        "(2, 0) beside sliding_window",
        "one of the two",
    ),
    (
        "ragged",
        {"query": t(6, 4, 577), "kv_cache": t(4, 8, 4, 577)},
        ValueError,
        "query",
        "head size 577",
        "1 to 576",
    ),
    (
        "ragged",
        {"query": t(6, 4, 513), "kv_cache": t(4, 8, 4, 513)},
        ValueError,
        "kv_cache",
        "head size 513",
        "1 to 512",
    ),
    (
        "pair",
        {"kv_cache": (t(4, 8, 2, 16), t(4, 8, 2, 513))},
        ValueError,
        "value_cache",
        "head size 513",
        "1 to 512",
    ),
    ("fused", {"key": t(5, 2, 16)}, ValueError, "key", "[5, 2, 16]", "T = 6 by query"),
    ("fused", {"key": t(6, 2, 8)}, ValueError, "key", "[6, 2, 8]", "D = 16 by query"),
    ("fused", {"key": t(6, 32)}, ValueError, "key", "[6, 32]", "[T, Hk, D]"),
    ("fused", {"key": t(6, 3, 16)}, ValueError, "kv_cache", "[4, 8, 4, 16]", "Hk = 3 by key"),
    ("fused", {"key": None}, TypeError, "key", "None", "float32, float16, bfloat16"),
    ("fused", {"key": t(6, 2, 16, dtype=I32)}, TypeError, "key", "int32", "float8_e5m2"),
    ("fused", {"value": t(6, 2, 16, dtype=F16)}, TypeError, "value", "float16", "float32, the dtype of key"),
    ("fused", {"value": t(6, 2, 8)}, ValueError, "value", "[6, 2, 8]", "Dv = 16 by kv_cache"),
    ("fused_pair", {"value": t(6, 2, 8)}, ValueError, "value", "[6, 2, 8]", "Dv = 16 by value_cache"),
    (
        "fused",
        {n: t(6, 2, 16, dtype=BF16) for n in NEW},
        TypeError,
        "kv_cache",
        "float32",
        "bfloat16, the dtype of key",
    ),
    (
        "fused_pair",
        {n: t(6, 2, 16, dtype=BF16) for n in NEW},
        TypeError,
        "key_cache",
        "float32",
        "bfloat16, the dtype of key",
    ),
    (
        "fused",
        {"kv_cache": t(4, 8, 4, 16, dtype=U8)},
        ValueError,
        "kv_cache_dtype",
        "'auto' for a uint8 kv_cache",
        "fp8_e4m3",
    ),
    (
        "fused",
        {"kv_cache": t(4, 8, 4, 16, dtype=U8), "kv_cache_dtype": "fp8_e5m2"}
        | {n: t(6, 2, 16, dtype=E4M3) for n in NEW},
        TypeError,
        "key",
        "float8_e4m3fn",
        "bfloat16, float8_e5m2 with a cache of float8_e5m2",
    ),
    (
        "fused",
        {"slot_mapping": t(7, dtype=I32)},
        ValueError,
        "slot_mapping",
        "7 slots",
        "at most the 6 tokens",
    ),
    ("fused", {"slot_mapping": t(6)}, TypeError, "slot_mapping", "float32", "int32, int64"),
    ("fused", {"slot_mapping": t(6, 1, dtype=I32)}, ValueError, "slot_mapping", "[6, 1]", "[N]"),
    ("fused", {"k_scale": t(2, 2)}, ValueError, "k_scale", "[2, 2]", "[1] or [Hk]"),
    ("fused", {"kv_cache": None}, TypeError, "kv_cache", "None", "float32, float16, bfloat16"),
    ("fused_pair", {"kv_cache": (t(4, 8, 2, 16), None)}, TypeError, "value_cache", "None", "a tensor"),
    ("fused_pair", {"layout": "stacked"}, ValueError, "layout", "'stacked'", "'stacked' is for one tensor"),
    (
        "fused_pair",
        {"kv_cache": (t(4, 8, 2, 16), t(5, 8, 2, 16))},
        ValueError,
        "value_cache",
        "[5, 8, 2, 16]",
        "P = 4 by key_cache",
    ),
    (
        "fused_pair",
        {"value": t(6, 2, 513), "kv_cache": (t(4, 8, 2, 16), t(4, 8, 2, 513))},
        ValueError,
        "value",
        "head size 513",
        "1 to 512",
    ),
    (
        "fused",
        {"window_size": (2, 0), "sliding_window": 3},
        ValueError,
        "window_size",
        "(2, 0) beside sliding_window",
        "one of the two",
    ),
    ("write", {"layout": None}, TypeError, "layout", "None (NoneType)", "str"),
    ("write", {"key": None, "k_scale": 0.5}, TypeError, "key", "None", "float32, float16, bfloat16"),
    ("write_one", {"layout": None}, TypeError, "layout", "None (NoneType)", "str"),
    ("ragged", {"layout": None}, TypeError, "layout", "None (NoneType)", "str"),
    ("ragged", {"query": None, "v_scale": 2.0}, TypeError, "query", "None", "float32, float16, bfloat16"),
    ("ragged", {"kv_cache": None}, TypeError, "kv_cache", "None", "float32, float16, bfloat16"),
    ("ragged", {"sliding_window": 2.5}, TypeError, "sliding_window", "2.5 (float)", "int or None"),
    ("pair", {"layout": None}, TypeError, "layout", "None (NoneType)", "str"),
    ("pair", {"layout": "foo"}, ValueError, "layout", "'foo'", "'NHD', 'HND' with a pair"),
    ("pair", {"layout": "hnd"}, ValueError, "layout", "'hnd'", "'NHD', 'HND' with a pair"),
    ("pair", {"layout": "stacked"}, ValueError, "layout", "'stacked'", "'stacked' is for one tensor"),
    ("pair", {"kv_cache": (t(4, 8, 2, 16),) * 3}, ValueError, "kv_cache", "3 tensors", "a pair (key_cache, "),
    ("pair", {"kv_cache": (t(4, 8, 2, 16),)}, ValueError, "kv_cache", "1 tensors", "a pair (key_cache, "),
    ("pair", {"kv_cache": (t(4, 8, 2, 16), None)}, TypeError, "value_cache", "None", "a tensor"),
    ("pair", {"kv_cache": (None, t(4, 8, 2, 16))}, TypeError, "key_cache", "None", "a tensor"),
    (
        "pair",
        {"kv_cache": (t(4, 8, 2, 8), t(4, 8, 2, 16))},
        ValueError,
        "key_cache",
        "[4, 8, 2, 8]",
        "D = 16",
    ),
    (
        "pair",
        {"kv_cache": (t(4, 8, 2, 16), t(5, 8, 2, 16))},
        ValueError,
        "value_cache",
        "[5, 8, 2, 16]",
        "P = 4 by key_cache",
    ),
    ("pair", {"kv_cache": (t(4, 8, 2, 16, dtype=I32),) * 2}, TypeError, "key_cache", "int32", "float32"),
    ("pair", {"query": t(6, 5, 16)}, ValueError, "query", "5 heads", "2 heads of key_cache"),
    ("pair", {"query": t(6, 4, 16, dtype=BF16)}, TypeError, "key_cache", "float32", "bfloat16"),
    ("merge", {"lse_b": None}, TypeError, "lse_b", "None", "float32"),
    ("merge", {"out_b": t(5, 4, 16, dtype=F16)}, TypeError, "out_b", "float16", "float32"),
    ("merge", {"out_b": t(5, 4, 8)}, ValueError, "out_b", "[5, 4, 8]", "D = 16"),
    ("merge", {"lse_a": t(5, 4)}, ValueError, "lse_a", "[5, 4]", "[H, T]"),
    ("merge", {"lse_b": t(4, 5, dtype=F16)}, TypeError, "lse_b", "float16", "float32"),
]


def name_of(row: tuple) -> str:
    call, changes, _, argument, got, _ = row
    return f"{call}-{'+'.join(changes)}-{argument}-{got}"


def method_of(frontend: Frontend, function: str) -> Callable[..., Any]:
    """A call of a function by its arguments."""
    return getattr(frontend, function, lambda **arguments: frontend.run(function, arguments))


def check_error(frontend: Frontend, row: tuple, error: type[Exception] | tuple[type[Exception], ...]) -> None:
    call, changes, _, argument, got, accepted = row
    function, valid = ALL[call]
    with pytest.raises(error) as raised:
        method_of(frontend, function)(**valid | changes)
    message = str(raised.value)
    named = [function]
    if frontend.name in ("openxla", "inductor") and call in FORMS:
        named.append("flash_attn_varlen_func")
    start = max(message.find(f"{name}: {argument}: got ") for name in named)
    assert start >= 0, message
    is_got, _, is_accepted = message[start:].partition("; accepted: ")
    assert got in is_got, message
    assert accepted in is_accepted, message


@pytest.mark.frontends("torch", "jax")
@pytest.mark.parametrize("row", ERRORS, ids=name_of)
def test_error(frontend: Frontend, row: tuple) -> None:
    check_error(frontend, row, row[2])


@pytest.mark.frontends("lazy", "jax_jit")
@pytest.mark.parametrize("row", ERRORS[::3], ids=name_of)
def test_error_at_trace_time(frontend: Frontend, row: tuple) -> None:
    check_error(frontend, row, row[2])


@pytest.mark.frontends("openxla", "inductor")
@pytest.mark.parametrize("row", ERRORS[::9], ids=name_of)
def test_error_in_torch_compile(frontend: Frontend, row: tuple) -> None:
    """Dynamo wraps the error into one of its own, which nothing can put into other words."""
    check_error(frontend, row, Exception)  # type: ignore[arg-type]


@pytest.mark.frontends("torch", "lazy", "jax", "jax_jit")
@pytest.mark.parametrize("call", ALL)
def test_valid_call(frontend: Frontend, call: str) -> None:
    """What the table changes is right as it is."""
    function, valid = ALL[call]
    method_of(frontend, function)(**valid)


# NumPy's numbers are numbers: (call, arguments).
NUMPY_SCALARS = [
    ("dense", {"max_seqlen_q": np.int32(6), "max_seqlen_k": np.uint8(9), "causal": np.True_}),
    ("dense", {"softmax_scale": np.float32(0.5), "softcap": np.int64(3), "return_softmax_lse": np.False_}),
    ("dense", {"window_size": (np.int64(4), np.int16(-1))}),
    ("dense", {"window_size": np.array([4, 0]).tolist()}),
    ("ragged", {"scale": np.float16(0.25), "sliding_window": np.int32(3), "soft_cap": np.float64(2.0)}),
    ("ragged", {"layout": np.str_("interleaved")}),
    ("ragged", {"causal": np.int64(0), "window_size": (np.int64(4), np.int16(-1))}),
    ("pair", {"layout": "interleaved"}),
    ("fused", {"scale": np.float16(0.25), "return_softmax_lse": np.True_}),
]


@pytest.mark.frontends("torch", "lazy", "jax", "jax_jit")
@pytest.mark.parametrize(("call", "scalars"), NUMPY_SCALARS, ids=str)
def test_numpy_scalars(frontend: Frontend, call: str, scalars: dict[str, Any]) -> None:
    function, valid = CALLS[call]
    python = {name: x.item() if isinstance(x, np.generic) else x for name, x in scalars.items()}
    got = getattr(frontend, function)(**valid | scalars)
    expected = getattr(frontend, function)(**valid | python)
    for x, y in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, expected)), strict=True):
        assert x is y is None or np.array_equal(x, y)


@pytest.mark.frontends("torch", "jax")
def test_a_number_for_a_scale_may_be_numpys(frontend: Frontend) -> None:
    caches = FP8_CACHES | {"key": np.ones_like(WRITE["key"]), "slot_mapping": np.arange(5)}
    got = frontend.reshape_and_cache_flash(
        **WRITE | caches | {"k_scale": np.float32(0.5), "v_scale": np.int32(2)}
    )
    expected = frontend.reshape_and_cache_flash(**WRITE | caches | {"k_scale": 0.5, "v_scale": 2})
    for x, y in zip(got, expected, strict=True):
        assert np.array_equal(x, y)
    assert got[0].any()


@pytest.mark.frontends("torch", "lazy", "jax", "jax_jit")
@pytest.mark.parametrize("call", ["dense", "paged", "ragged", "fused", "packed", "equal", "equal_packed"])
def test_a_side_of_a_window_may_be_none(frontend: Frontend, call: str) -> None:
    function, valid = ALL[call]
    rng = np.random.default_rng(0)
    valid = {
        name: rng.standard_normal(x.shape, F32) if isinstance(x, np.ndarray) and x.dtype == F32 else x
        for name, x in valid.items()
    }
    for sides, as_numbers in (((None, 0), (-1, 0)), ((1, None), (1, -1)), ((None, None), (-1, -1))):
        got = method_of(frontend, function)(**valid, window_size=sides)
        expected = method_of(frontend, function)(**valid, window_size=as_numbers)
        assert np.array_equal(got[0], expected[0])
