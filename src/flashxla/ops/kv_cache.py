"""Declarations: writing new keys and values into a paged cache."""

from __future__ import annotations

from flashxla.ops.cache_format import (
    CACHE_DTYPES,
    DTYPE_CODES,
    LAYOUT_CODES,
    ONE_TENSOR_DIMS,
    PAIR_DIMS,
    check_same_dtype,
    element_dtype,
)
from flashxla.ops.op import FLOATS, Inputs, Native, Op, Resolution, Scalar, Tensor

KV_CACHE = Native(
    "kv_cache",
    inputs=("key", "value", "key_cache", "value_cache", "slot_mapping", "k_scale", "v_scale"),
    results=("key_cache", "value_cache"),
    integers=("layout", "cache_dtype"),
)

_KEY = Tensor("key", "N Hk D", FLOATS, slot="key")
_VALUE = Tensor("value", "N Hk D", FLOATS, slot="value")
_SLOT_MAPPING = Tensor("slot_mapping", "T", ("int32", "int64"), slot="slot_mapping")
_KV_CACHE_DTYPE = Scalar("kv_cache_dtype", str, "auto")
_SCALES = (
    Tensor("k_scale", "()|1|Hk", ("float32",), slot="k_scale", optional=True),
    Tensor("v_scale", "()|1|Hk", ("float32",), slot="v_scale", optional=True),
)


def _resolve(inputs: Inputs, caches: tuple[str, ...]) -> Resolution:
    check_same_dtype(inputs, "value", "key")
    element = element_dtype(inputs, caches[0])
    quantized = inputs["kv_cache_dtype"] != "auto"
    if not quantized:
        check_same_dtype(inputs, caches[0], "key")
    if inputs.size("T") > inputs.size("N"):
        raise inputs.value_error(
            "slot_mapping", f"{inputs.size('T')} slots", f"at most the {inputs.size('N')} tokens of key"
        )
    return Resolution(
        attributes={"layout": LAYOUT_CODES[inputs["layout"]], "cache_dtype": DTYPE_CODES[element]},
        results=tuple(inputs[name] for name in caches),
        unused=frozenset() if quantized else frozenset({"k_scale", "v_scale"}),
    )


def _reshape_and_cache_flash(inputs: Inputs) -> Resolution:
    dims = PAIR_DIMS[inputs.choice("layout", tuple(PAIR_DIMS))]
    inputs.check_dims("key_cache", dims)
    inputs.check_dims("value_cache", dims)
    check_same_dtype(inputs, "value_cache", "key_cache")
    return _resolve(inputs, ("key_cache", "value_cache"))


def _reshape_and_cache(inputs: Inputs) -> Resolution:
    inputs.check_dims("kv_cache", ONE_TENSOR_DIMS[inputs.choice("layout", tuple(ONE_TENSOR_DIMS))])
    return _resolve(inputs, ("kv_cache",))


RESHAPE_AND_CACHE_FLASH = Op(
    "reshape_and_cache_flash",
    KV_CACHE,
    (
        _KEY,
        _VALUE,
        Tensor("key_cache", "", CACHE_DTYPES, slot="key_cache", mutated=True),
        Tensor("value_cache", "", CACHE_DTYPES, slot="value_cache", mutated=True),
        _SLOT_MAPPING,
        _KV_CACHE_DTYPE,
        *_SCALES,
        Scalar("layout", str, "NHD"),
    ),
    _reshape_and_cache_flash,
)

RESHAPE_AND_CACHE = Op(
    "reshape_and_cache",
    KV_CACHE,
    (
        _KEY,
        _VALUE,
        Tensor("kv_cache", "", CACHE_DTYPES, slot="key_cache", mutated=True),
        _SLOT_MAPPING,
        Scalar("layout", str),
        _KV_CACHE_DTYPE,
        *_SCALES,
    ),
    _reshape_and_cache,
)
