"""How a K/V cache is stored: the memory layouts and the element formats, each in one table."""

from __future__ import annotations

from flashxla.ops.op import FLOATS, FP8, Inputs

# The codes are those of csrc/include/flashxla/common.h; a tensor's dims by layout.
LAYOUT_CODES = {
    "NHD": 0,
    "HND": 1,
    "interleaved": 2,
    "packed_HND": 3,
    "packed_NHD": 4,
    "stacked": 5,
}
PAIR_DIMS = {"NHD": "P B Hk D", "HND": "P Hk B D"}
ONE_TENSOR_DIMS = {
    "interleaved": "P B 2*Hk D",
    "packed_HND": "P Hk B 2*D",
    "packed_NHD": "P B Hk 2*D",
    "stacked": "2 P B Hk D",
}
DTYPE_CODES = {
    "float32": 0,
    "float16": 1,
    "bfloat16": 2,
    "float8_e4m3fn": 3,
    "float8_e5m2": 4,
    "uint8": 5,
    "int32": 6,
    "int64": 7,
}
CACHE_DTYPES = (*FLOATS, *FP8, "uint8")
FP8_FORMATS = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
KV_CACHE_DTYPES = ("auto", *FP8_FORMATS)


def element_dtype(inputs: Inputs, argument: str) -> str:
    """The dtype of a cache's elements: its own, or what `kv_cache_dtype` says the bytes of a uint8 cache are."""
    dtype = inputs[argument].dtype
    named = inputs.choice("kv_cache_dtype", KV_CACHE_DTYPES)
    if named == "auto":
        if dtype == "uint8":
            raise inputs.value_error(
                "kv_cache_dtype",
                f"'auto' for a uint8 {inputs.label(argument)}",
                f"{', '.join(FP8_FORMATS)} (its format)",
            )
        return dtype
    element = FP8_FORMATS[named]
    if dtype not in ("uint8", element):
        raise inputs.type_error(
            argument, f"dtype {dtype} with kv_cache_dtype {named!r}", f"uint8 or {element}"
        )
    return element


def check_same_dtype(inputs: Inputs, argument: str, other: str) -> None:
    """Raise unless two tensors have one dtype."""
    if inputs[argument] is not None and inputs[argument].dtype != inputs[other].dtype:
        raise inputs.type_error(
            argument,
            f"dtype {inputs[argument].dtype}",
            f"{inputs[other].dtype}, the dtype of {inputs.label(other)}",
        )
