"""Declarations: attention of serving engines over a paged cache, with or without the write of the new tokens."""

from __future__ import annotations

from typing import Any

from flashxla.ops import attention
from flashxla.ops.arguments import DEFAULT_LAYOUT, cache_tensors, sides_of_windows
from flashxla.ops.cache_format import CACHE_DTYPES, check_cache, check_written
from flashxla.ops.op import Inputs, Op, Resolution
from flashxla.ops.parameters import FLOATS, FP8, Parameter, Scalar, Tensor


def paged_attention(
    query: Any,
    kv_cache: Any,
    context_lens: Any,
    block_tables: Any,
    query_start_loc: Any,
    num_seqs: Any,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    layout: str = DEFAULT_LAYOUT,
    *,
    kv_cache_dtype: str = "auto",
    causal: bool = True,
    window_size: tuple[int, int] | None = None,
    alibi_slopes: Any = None,
    s_aux: Any = None,
    return_softmax_lse: bool = False,
    max_seqlen_q: int | None = None,
    batch_invariant: bool = False,
) -> Any:
    """Ragged paged attention: prefill, decode and mixed batches in one call.

    Args:
        query: [T, Hq, D]; D <= 576.
        kv_cache: one tensor by layout (see reshape_and_cache), or a (key_cache, value_cache) pair, whose head sizes
            may differ: D <= 576, Dv <= 512. One tensor: D <= 512.
        context_lens: int32 [S], all keys of each sequence, the new tokens among them.
        block_tables: int32 [S, M], the pages of each sequence.
        query_start_loc: int32 [S+1], offsets of the sequences in query.
        num_seqs: int32 [1]: only the first num_seqs sequences are real.
        scale: factor of the scores, usually 1 / sqrt(D).
        sliding_window: a query sees this many last keys, itself among them; None is all.
        soft_cap: soft_cap * tanh(score / soft_cap).
        k_scale, v_scale: factors of K and V: a number, or float32 with one element, [Hk] or [S, Hk].
        layout: how kv_cache holds K and V. Of a pair "NHD" or "HND"; the default means "NHD" there.
        kv_cache_dtype: "auto", "fp8" = "fp8_e4m3" or "fp8_e5m2" (uint8 caches need it).
        causal: query i of a sequence sees keys up to its own position, i + context_len - len_q.
        window_size: (left, right) keys around that position; -1 is unlimited. In place of sliding_window.
        alibi_slopes: float32 [Hq] or [S, Hq]; adds -slope * |distance of query and key| after the soft cap.
        s_aux: [Hq] attention sinks: exp(s_aux) joins the softmax's denominator.
        return_softmax_lse: also return the log of the softmax's denominator.
        max_seqlen_q: upper bound of each sequence's queries, part of the compiled program; None is T. A step that
            only decodes is faster with 1.
        batch_invariant: the bits of a row of out and of the LSE depend on its query and the keys that it sees alone,
            not on what else is in the batch or how a prompt is cut. FLASHXLA_BATCH_INVARIANT=1 means all calls.

    Returns:
        out [T, Hq, Dv] in query's dtype (bfloat16 for a float8 query); with return_softmax_lse also the natural-log
        LSE, float32 [Hq, T]. Padding tokens: out 0, LSE -inf.

    Raises:
        TypeError, ValueError: wrong dtypes or shapes.

    Semantics of ragged_paged_attention (PyTorch/XLA and JAX on TPUs).
    """
    first, second, layout = cache_tensors("paged_attention", kv_cache, layout)
    left, right = sides_of_windows("paged_attention", sliding_window, window_size)
    return (
        query,
        first,
        context_lens,
        block_tables,
        query_start_loc,
        num_seqs,
        scale,
        sliding_window,
        soft_cap,
        k_scale,
        v_scale,
        second,
        layout,
        kv_cache_dtype,
        causal,
        left,
        right,
        alibi_slopes,
        s_aux,
        return_softmax_lse,
        max_seqlen_q,
        batch_invariant,
    )


def ragged_paged_attention(
    query: Any,
    key: Any,
    value: Any,
    kv_cache: Any,
    context_lens: Any,
    block_tables: Any,
    query_start_loc: Any,
    num_seqs: Any,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    layout: str = DEFAULT_LAYOUT,
    *,
    slot_mapping: Any = None,
    kv_cache_dtype: str = "auto",
    causal: bool = True,
    window_size: tuple[int, int] | None = None,
    alibi_slopes: Any = None,
    s_aux: Any = None,
    return_softmax_lse: bool = False,
    max_seqlen_q: int | None = None,
    batch_invariant: bool = False,
) -> Any:
    """Write new keys and values into a paged cache, in place, and attend to the whole of it: one call a layer.

    Args:
        query: [T, Hq, D]; D <= 576.
        key, value: [T, Hk, D] and [T, Hk, Dv], of the new tokens: float32, float16, bfloat16, or the float8 of an
            fp8 cache, which is copied.
        kv_cache: one tensor by layout (see reshape_and_cache), or a (key_cache, value_cache) pair; updated in place.
        slot_mapping: int32 or int64 [N], N <= T: where each token goes (see reshape_and_cache_flash). None: the
            tokens of a sequence are the last of its context_lens keys and go where block_tables has those; a token
            without a place is not written.
        k_scale, v_scale: a number, or float32 with one element or [Hk]. An fp8 cache holds x / scale; scores and
            values are multiplied by them.
        Others: as for paged_attention.

    Returns:
        In PyTorch what paged_attention returns. In JAX that and the new kv_cache, one array or a pair as given:
        (out, kv_cache), or (out, lse, kv_cache) with return_softmax_lse.

    Raises:
        TypeError, ValueError: wrong dtypes or shapes.

    Semantics of ragged_paged_attention, version 3, of tpu-inference.
    """
    first, second, layout = cache_tensors("ragged_paged_attention", kv_cache, layout)
    left, right = sides_of_windows("ragged_paged_attention", sliding_window, window_size)
    return (
        query,
        key,
        value,
        first,
        context_lens,
        block_tables,
        query_start_loc,
        num_seqs,
        scale,
        sliding_window,
        soft_cap,
        k_scale,
        v_scale,
        second,
        layout,
        slot_mapping,
        kv_cache_dtype,
        causal,
        left,
        right,
        alibi_slopes,
        s_aux,
        return_softmax_lse,
        max_seqlen_q,
        batch_invariant,
    )


def ragged_paged_attention_qkvpacked(
    qkv: Any,
    kv_cache: Any,
    context_lens: Any,
    block_tables: Any,
    query_start_loc: Any,
    num_seqs: Any,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    layout: str = DEFAULT_LAYOUT,
    *,
    slot_mapping: Any = None,
    kv_cache_dtype: str = "auto",
    causal: bool = True,
    window_size: tuple[int, int] | None = None,
    alibi_slopes: Any = None,
    s_aux: Any = None,
    return_softmax_lse: bool = False,
    max_seqlen_q: int | None = None,
    batch_invariant: bool = False,
) -> Any:
    """ragged_paged_attention with the queries, keys and values of a token behind each other, in one tensor.

    So comes what a model's projection and its rotary embedding make, and a compiler need not take it apart.

    Args:
        qkv: [T, Hq + 2 * Hk, D], the heads of the query, then those of the key, then those of the value, where Hk is
            the cache's number of heads. Dtypes as of key in ragged_paged_attention. Keys and values have one head size.
        Others: as for ragged_paged_attention.

    Returns:
        As ragged_paged_attention.

    Raises:
        TypeError, ValueError: wrong dtypes or shapes.

    Packed as in FlashAttention's functions of that ending. Over several devices XLA gathers qkv, for its heads are of
    three kinds: divide with jax.shard_map, or use ragged_paged_attention.
    """
    first, second, layout = cache_tensors("ragged_paged_attention_qkvpacked", kv_cache, layout)
    left, right = sides_of_windows("ragged_paged_attention_qkvpacked", sliding_window, window_size)
    return (
        qkv,
        first,
        context_lens,
        block_tables,
        query_start_loc,
        num_seqs,
        scale,
        sliding_window,
        soft_cap,
        k_scale,
        v_scale,
        second,
        layout,
        slot_mapping,
        kv_cache_dtype,
        causal,
        left,
        right,
        alibi_slopes,
        s_aux,
        return_softmax_lse,
        max_seqlen_q,
        batch_invariant,
    )


def _resolve(inputs: Inputs, query: str, element: str, layout: str) -> Resolution:
    window = inputs["sliding_window"]
    if window is not None and window < 1:
        raise inputs.value_error("sliding_window", window, "None or a number of keys >= 1")
    left = attention.window_side(inputs, "window_left")
    longest = inputs["max_seqlen_q"]
    if longest is None:
        longest = inputs.size("T")
    elif longest < 0:
        raise inputs.value_error("max_seqlen_q", longest, "None or a number of tokens >= 0")
    capacity = inputs["block_tables"].shape[1] * inputs.size("B")
    return Resolution(
        attributes={
            "layout": layout,
            "kv_dtype": element,
            "causal": int(inputs["causal"]),
            "window_left": left if window is None else attention.int32(window - 1),
            "window_right": attention.window_side(inputs, "window_right"),
            "batch_invariant": attention.batch_invariant(inputs),
            "max_seqlen_q": attention.int32(longest),
            "max_seqlen_k": attention.int32(capacity),
            "softmax_scale": attention.finite(inputs, "scale"),
            "softcap": attention.softcap(inputs, "soft_cap"),
        },
        results=attention.results(inputs, query),
    )


def _paged_attention(inputs: Inputs) -> Resolution:
    layout = check_cache(inputs, "kv_cache", "value_cache")
    for name in ("k_scale", "v_scale"):
        inputs.check_dims(name, attention.DESCALE)
    return _resolve(inputs, "query", attention.check_query(inputs, "query", "kv_cache"), layout)


def _ragged_paged_attention(inputs: Inputs) -> Resolution:
    inputs.check_dims("key", "T Hk D")
    layout = check_cache(inputs, "kv_cache", "value_cache")
    inputs.check_dims("value", "T Hk Dv")
    return _write_and_attend(inputs, layout, "query", "key", "value")


def _ragged_paged_attention_qkvpacked(inputs: Inputs) -> Resolution:
    layout = check_cache(inputs, "kv_cache", "value_cache")
    head_sizes = inputs.size("D"), inputs.size("Dv")
    if head_sizes[0] != head_sizes[1]:
        raise inputs.value_error("value_cache", f"head size {head_sizes[1]}", f"{head_sizes[0]}, that of qkv")
    heads, kv_heads = inputs.size("Hqkv"), inputs.size("Hk")
    # Slopes and sinks, if given, have said how many query heads there are.
    query_heads, of = inputs.sizes.setdefault("Hq", (heads - 2 * kv_heads, "qkv"))
    if query_heads < 1 or heads != query_heads + 2 * kv_heads:
        wanted = "query heads" if of == "qkv" else f"the {query_heads} of {of}"
        raise inputs.value_error(
            "qkv", f"{heads} heads", f"{wanted} and 2 * {kv_heads}, those of {inputs.label('kv_cache')}"
        )
    return _write_and_attend(inputs, layout, "qkv", "qkv", "qkv")


def _write_and_attend(inputs: Inputs, layout: str, query: str, key: str, value: str) -> Resolution:
    for name in ("k_scale", "v_scale"):
        inputs.check_dims(name, "()|1|Hk")
    element = attention.check_query(inputs, query, "kv_cache")
    check_written(inputs, key, value, "kv_cache", element)
    slots = inputs["slot_mapping"]
    if slots is not None and slots.shape[0] > inputs.size("T"):
        raise inputs.value_error(
            "slot_mapping", f"{slots.shape[0]} slots", f"at most the {inputs.size('T')} tokens of {key}"
        )
    return _resolve(inputs, query, element, layout)


def _index_parameters() -> tuple[Parameter, ...]:
    return (
        Tensor("context_lens", "S", ("int32",), "seqused_k"),
        Tensor("block_tables", "S M", ("int32",), "block_table"),
        Tensor("query_start_loc", "S+1", ("int32",), "cu_seqlens_q"),
        Tensor("num_seqs", "()|1", ("int32",), "num_seqs"),
        Scalar("scale", float),
        Scalar("sliding_window", int, None),
        Scalar("soft_cap", float, None),
        Tensor("k_scale", "", ("float32",), "k_descale", optional=True, number=True),
        Tensor("v_scale", "", ("float32",), "v_descale", optional=True, number=True),
    )


def _mask_parameters() -> tuple[Parameter, ...]:
    return (
        Scalar("kv_cache_dtype", str, "auto"),
        Scalar("causal", bool, True),
        Scalar("window_left", int, -1),
        Scalar("window_right", int, -1),
        Tensor("alibi_slopes", "Hq|S Hq", ("float32",), "alibi_slopes", optional=True),
        Tensor("s_aux", "Hq", FLOATS, "sinks", optional=True),
        Scalar("return_softmax_lse", bool, False),
        Scalar("max_seqlen_q", int, None),
        Scalar("batch_invariant", bool, False),
    )


_QUERY = Tensor("query", "T Hq D", (*FLOATS, *FP8), "q")
_PAIR = ("key_cache", "value_cache")

PAGED_ATTENTION = Op(
    "paged_attention_with_lse",
    "attention",
    (
        _QUERY,
        Tensor("kv_cache", "", CACHE_DTYPES, "k", pair=_PAIR),
        *_index_parameters(),
        Tensor("value_cache", "", CACHE_DTYPES, "v", optional=True),
        Scalar("layout", str, DEFAULT_LAYOUT),
        *_mask_parameters(),
    ),
    _paged_attention,
    results=attention.RESULTS,
    parallel=(attention.HEADS,),
    public=paged_attention,
)


def _updated_cache_parameters() -> tuple[Parameter, ...]:
    return (
        Tensor("kv_cache", "", CACHE_DTYPES, "k", updated=True, pair=_PAIR),
        *_index_parameters(),
        Tensor("value_cache", "", CACHE_DTYPES, "v", optional=True, updated=True),
        Scalar("layout", str, DEFAULT_LAYOUT),
        Tensor("slot_mapping", "N", ("int32", "int64"), "slot_mapping", optional=True),
        *_mask_parameters(),
    )


RAGGED_PAGED_ATTENTION = Op(
    "ragged_paged_attention",
    "attention",
    (
        _QUERY,
        Tensor("key", "", (*FLOATS, *FP8), "key"),
        Tensor("value", "", (*FLOATS, *FP8), "value"),
        *_updated_cache_parameters(),
    ),
    _ragged_paged_attention,
    results=attention.RESULTS,
    parallel=(attention.HEADS,),
    public=ragged_paged_attention,
)

RAGGED_PAGED_ATTENTION_QKVPACKED = Op(
    "ragged_paged_attention_qkvpacked",
    "attention",
    (Tensor("qkv", "T Hqkv D", (*FLOATS, *FP8), "qkv"), *_updated_cache_parameters()),
    _ragged_paged_attention_qkvpacked,
    results=attention.RESULTS,
    public=ragged_paged_attention_qkvpacked,
)
