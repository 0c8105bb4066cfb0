"""How results are compared, and how far they may be off."""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np

Array = np.ndarray

DTYPES = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "u8": np.dtype(np.uint8),
}

# Absolute and relative, against float64, for values of unit size. float32: sums of some thousand products
# in any order. 16 bits: one rounding of the result (half an ulp: 2**-9 and 2**-12 of it) and, in kernels that
# feed matrix units, one of each softmax weight. vLLM's tests allow 1.5e-2 and 1e-2 for both.
TOLERANCE = {"f32": (2e-5, 2e-5), "f16": (3e-3, 2e-3), "bf16": (1e-2, 8e-3)}
# Of 16 bits gradients are rounded once.
GRADIENT_TOLERANCE = {"f32": (1e-5, 2e-5), "f16": (1e-5, 6e-4), "bf16": (1e-5, 4e-3)}
# On a GPU weights and the scores' gradients are, too, before matrix units sum them up. Of the largest gradient.
ROUNDED_FACTORS: dict[str, dict[str, float]] = {"cpu": {}, "cuda": {"f16": 2e-3, "bf16": 1e-2}}
LSE_TOLERANCE = (1e-4, 1e-5)  # float32 whatever the inputs are


class Rounding(NamedTuple):
    """What products of e4m3 may change, besides."""

    out: Array  # of each element of out
    dim: int  # of the queries' heads

    @property
    def lse_tolerance(self) -> tuple[float, float]:
        """A GPU adds them up with about 13 bits: the error grows with the scores, and with the numbers of a large sum.

        Random calls met 7e-4 of the LSE with heads of 256, once in some hundred calls.
        """
        return 2e-3, 5e-4 * max(self.dim / 128, 1.0)


def assert_close(actual: Array, expected: Array, tolerance: tuple[float, float], what: str = "out") -> None:
    """Equal up to a tolerance; NaN and infinity must be at the same places."""
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    atol, rtol = tolerance
    np.testing.assert_allclose(actual.astype(np.float64), expected, atol=atol, rtol=rtol, err_msg=what)


def assert_gradients(actual: Array, expected: Array, dtype: np.dtype, what: str, device: str) -> None:
    """Hold gradients against float64. dtype: of q; a gradient of another dtype has the coarser one's tolerance.

    device: where they were computed. A gradient is a sum of many terms of both signs, so its error is measured against
    the largest one.
    """
    coarser = min(actual.dtype, dtype, key=lambda dtype: dtype.itemsize)
    name = next(name for name, d in DTYPES.items() if d == coarser)
    atol, rtol = GRADIENT_TOLERANCE[name]
    largest = np.abs(expected).max(initial=0.0)
    atol = atol * max(largest, 1.0) + ROUNDED_FACTORS[device].get(name, 0.0) * largest
    assert_close(actual, expected, (atol, rtol), f"gradient of {what}")


def assert_same_bits(actual: Array, expected: Array, what: str) -> None:
    """Equal bit by bit, NaN payloads included."""
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    bits = f"u{actual.dtype.itemsize}"
    np.testing.assert_array_equal(
        np.ascontiguousarray(actual).view(bits), np.ascontiguousarray(expected).view(bits), err_msg=what
    )


def assert_attention(
    out: Array,
    lse: Array | None,
    expected: tuple[Array, Array],
    query_dtype: np.dtype,
    rounding: Rounding | None = None,
    unit: float = 1.0,
) -> None:
    """Hold a result against the reference: the dtype of out, its values, and the LSE if there is one.

    rounding: what products of e4m3 may change (engines.rounding_of_weights).
    unit: what values of unit size are multiplied by, where that makes them larger.
    """
    name = next(name for name, dtype in DTYPES.items() if dtype == query_dtype)
    result = "bf16" if name in ("e4m3", "e5m2") else name
    assert out.dtype == DTYPES[result], f"out: {out.dtype}"
    expected_out, expected_lse = expected
    untouched = np.isneginf(expected_lse).T  # no key and no sink: exactly 0, not nearly
    assert not np.any(out[untouched].astype(np.float64)), "rows that see no key are not 0"
    if rounding is not None:
        error = out.astype(np.float64) - expected_out
        out = expected_out + np.sign(error) * np.maximum(np.abs(error) - rounding.out, 0)
    atol, rtol = TOLERANCE[result]
    assert_close(out, expected_out, (atol * unit, rtol))
    if lse is not None:
        assert lse.dtype == np.float32, f"lse: {lse.dtype}"
        assert_close(lse, expected_lse, LSE_TOLERANCE if rounding is None else rounding.lse_tolerance, "lse")
