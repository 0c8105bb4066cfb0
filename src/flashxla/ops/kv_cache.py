"""Declarations: writing new keys and values into a paged cache."""

from __future__ import annotations

from typing import Any

from flashxla.ops.cache_format import (
    CACHE_DTYPES,
    ONE_TENSOR_DIMS,
    PAIR_DIMS,
    check_one,
    check_pair,
    check_written,
    element_dtype,
)
from flashxla.ops.op import Inputs, Op, Resolution
from flashxla.ops.parameters import FLOATS, FP8, Scalar, Tensor
from flashxla.ops.parts import Parallel


def reshape_and_cache_flash(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    kv_cache_dtype: str = "auto",
    k_scale: Any = None,
    v_scale: Any = None,
    *,
    layout: str = "NHD",
) -> Any:
    """Write new keys and values into a paged cache, in place.

    Args:
        key, value: [T', Hk, D] and [T', Hk, Dv], float32, float16, bfloat16, or the float8 of an fp8 cache.
        key_cache, value_cache: [P, B, Hk, D] (layout "NHD") or [P, Hk, B, D] ("HND"); updated in place.
        slot_mapping: int32 or int64 [T], T <= T'. Token t goes to slot = block * B + offset; a slot < 0 is
            padding, a slot >= P * B is skipped (an error with FLASHXLA_CHECK=1).
        kv_cache_dtype: "auto" (the caches have key's dtype), "fp8" = "fp8_e4m3" or "fp8_e5m2": the caches are
            uint8 or that float8 type and hold x / scale, nearest even, saturating.
        k_scale, v_scale: a number, or float32 with one element or [Hk]; None is 1. For fp8 caches only.
        layout: "NHD" or "HND".

    Returns:
        Nothing in PyTorch; (key_cache, value_cache) in JAX.

    Raises:
        TypeError, ValueError: wrong dtypes or shapes.

    Semantics of vLLM's reshape_and_cache_flash.
    """
    return key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale, layout


def reshape_and_cache(
    key: Any,
    value: Any,
    kv_cache: Any,
    slot_mapping: Any,
    layout: str,
    kv_cache_dtype: str = "auto",
    k_scale: Any = None,
    v_scale: Any = None,
) -> Any:
    """Write new keys and values into one tensor that holds both, in place.

    Args:
        key, value: [T', Hk, D], float32, float16, bfloat16, or the float8 of an fp8 cache.
        kv_cache: by layout: "interleaved" [P, B, 2*Hk, D] (K at even heads), "packed_HND" [P, Hk, B, 2*D],
            "packed_NHD" [P, B, Hk, 2*D], "stacked" [2, P, B, Hk, D]; updated in place.
        slot_mapping, kv_cache_dtype, k_scale, v_scale: as for reshape_and_cache_flash.
        layout: how kv_cache holds K and V.

    Returns:
        Nothing in PyTorch; kv_cache in JAX.

    Raises:
        TypeError, ValueError: wrong dtypes or shapes.
    """
    return key, value, kv_cache, slot_mapping, layout, kv_cache_dtype, k_scale, v_scale


_NEW = (*FLOATS, *FP8)
_SLOT_MAPPING = Tensor("slot_mapping", "T", ("int32", "int64"), "slot_mapping")
_KV_CACHE_DTYPE = Scalar("kv_cache_dtype", str, "auto")
_SCALES = (
    Tensor("k_scale", "()|1|Hk", ("float32",), "k_scale", optional=True, number=True),
    Tensor("v_scale", "()|1|Hk", ("float32",), "v_scale", optional=True, number=True),
)


def _resolve(inputs: Inputs, cache: str) -> Resolution:
    element = element_dtype(inputs, cache)
    check_written(inputs, "key", "value", cache, element)
    if inputs.size("T") > inputs.size("N"):
        raise inputs.value_error(
            "slot_mapping", f"{inputs.size('T')} slots", f"at most the {inputs.size('N')} tokens of key"
        )
    quantized = inputs["kv_cache_dtype"] != "auto"
    return Resolution(
        attributes={"layout": inputs["layout"], "cache_dtype": element},
        unused=frozenset() if quantized else frozenset({"k_scale", "v_scale"}),
    )


def _pair(inputs: Inputs) -> Resolution:
    check_pair(inputs, "key_cache", "value_cache", inputs.choice("layout", tuple(PAIR_DIMS)))
    return _resolve(inputs, "key_cache")


def _one(inputs: Inputs) -> Resolution:
    check_one(inputs, "kv_cache", inputs.choice("layout", tuple(ONE_TENSOR_DIMS)))
    inputs.check_dims("value", "N Hk D")
    return _resolve(inputs, "kv_cache")


RESHAPE_AND_CACHE_FLASH = Op(
    "reshape_and_cache_flash",
    "kv_cache",
    (
        Tensor("key", "N Hk D", _NEW, "key"),
        Tensor("value", "N Hk Dv", _NEW, "value"),
        Tensor("key_cache", "", CACHE_DTYPES, "key_cache", updated=True),
        Tensor("value_cache", "", CACHE_DTYPES, "value_cache", updated=True),
        _SLOT_MAPPING,
        _KV_CACHE_DTYPE,
        *_SCALES,
        Scalar("layout", str, "NHD"),
    ),
    _pair,
    public=reshape_and_cache_flash,
    parallel=(Parallel("Hk"),),
)

RESHAPE_AND_CACHE = Op(
    "reshape_and_cache",
    "kv_cache",
    (
        Tensor("key", "N Hk D", _NEW, "key"),
        Tensor("value", "", _NEW, "value"),
        Tensor("kv_cache", "", CACHE_DTYPES, "key_cache", updated=True),
        _SLOT_MAPPING,
        Scalar("layout", str),
        _KV_CACHE_DTYPE,
        *_SCALES,
    ),
    _one,
    public=reshape_and_cache,
    parallel=(Parallel("Hk"),),
)
