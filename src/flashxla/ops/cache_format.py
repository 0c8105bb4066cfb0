"""How a K/V cache is stored: the memory layouts and the element formats, each in one table."""

from __future__ import annotations

from flashxla.ops.op import Inputs
from flashxla.ops.parameters import FLOATS, FP8

# The tensors' dims by layout (csrc/include/flashxla/common.h). P blocks, B block size, Hk KV heads; D is the head
# size of keys and Dv that of values, which is D where one tensor holds both.
PAIR_DIMS = {"NHD": "P B Hk D", "HND": "P Hk B D"}
ONE_TENSOR_DIMS = {
    "interleaved": "P B 2*Hk D",
    "packed_HND": "P Hk B 2*D",
    "packed_NHD": "P B Hk 2*D",
    "stacked": "2 P B Hk D",
}
CACHE_DTYPES = (*FLOATS, *FP8, "uint8")
FP8_FORMATS = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
KV_CACHE_DTYPES = ("auto", *FP8_FORMATS)


def of_values(dims: str) -> str:
    """The dims of values, from those of keys."""
    return " ".join("Dv" if dim == "D" else dim for dim in dims.split())


def check_pair(inputs: Inputs, keys: str, values: str, layout: str) -> None:
    """Hold a pair of caches against a layout."""
    inputs.check_dims(keys, PAIR_DIMS[layout])
    inputs.check_dims(values, of_values(PAIR_DIMS[layout]))
    check_same_dtype(inputs, values, keys)


def check_one(inputs: Inputs, cache: str, layout: str) -> None:
    """Hold a cache of one tensor against a layout."""
    inputs.check_dims(cache, ONE_TENSOR_DIMS[layout])
    inputs.sizes.setdefault("Dv", (inputs.size("D"), inputs.label(cache)))


def check_cache(inputs: Inputs, first: str, second: str) -> str:
    """Hold a cache that is one tensor, or a pair where `second` is given, against `layout`; returns that."""
    if inputs[second] is not None:
        layout = inputs.choice("layout", tuple(PAIR_DIMS))
        check_pair(inputs, first, second, layout)
    else:
        layout = inputs.choice("layout", tuple(ONE_TENSOR_DIMS))
        check_one(inputs, first, layout)
    return layout


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


def check_written(inputs: Inputs, key: str, value: str, cache: str, element: str) -> None:
    """Hold new keys and values against a cache with elements of dtype `element`."""
    check_same_dtype(inputs, value, key)
    given = inputs[key].dtype
    if inputs["kv_cache_dtype"] == "auto":
        check_same_dtype(inputs, cache, key)
    elif given in FP8 and given != element:
        raise inputs.type_error(
            key, f"dtype {given}", f"{', '.join((*FLOATS, element))} with a cache of {element}"
        )


def check_same_dtype(inputs: Inputs, argument: str, other: str) -> None:
    """Raise unless two tensors have one dtype."""
    if inputs[argument] is not None and inputs[argument].dtype != inputs[other].dtype:
        raise inputs.type_error(
            argument,
            f"dtype {inputs[argument].dtype}",
            f"{inputs[other].dtype}, the dtype of {inputs.label(other)}",
        )
