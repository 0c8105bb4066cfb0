"""Quantised weights, which are dequantised when they are loaded: their products are those of the model's dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

# By vLLM's names; the others are refused (refusals.py).
SUPPORTED = ("gpt_oss_mxfp4", "mxfp4")

_BLOCK = 32  # weights that share a scale, of MXFP4
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def dequantise_mxfp4(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Weights of the OCP's MXFP4 as ordinary ones; exact in float32 and bfloat16.

    Args:
        packed: uint8 [..., columns / 2]: two weights in e2m1, the first in the low half.
        scales: uint8 [..., columns / 32], in e8m0: the exponent of two, plus 127.
        dtype: of the result.

    Returns:
        dtype [..., columns]
    """
    out = torch.empty(*packed.shape[:-1], packed.shape[-1] * 2, dtype=dtype)
    values = torch.from_numpy(_E2M1)
    # One expert after the other: the values of all are many times larger than what is packed.
    for result, codes, exponents in zip(
        *(x.reshape(-1, *x.shape[-2:]) for x in (out, packed, scales)), strict=True
    ):
        both = torch.stack((codes & 0xF, codes >> 4), dim=-1).to(torch.int32)
        blocks = values[both].reshape(*exponents.shape, _BLOCK)
        result.copy_(torch.ldexp(blocks, exponents.to(torch.int32)[..., None] - 127).reshape(result.shape))
    return out


def load_experts(process: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """What a method does with a layer's MXFP4 experts once they are loaded.

    Args:
        process: the same for weights that are not quantised.
    """

    def process_weights_after_loading(method: Any, layer: Any) -> None:
        if not hasattr(layer, "w13_weight_scale"):
            return  # done
        for name in ("w13", "w2"):
            packed, scales = getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_weight_scale")
            weights = dequantise_mxfp4(packed.data, scales.data, method.moe.in_dtype)
            delattr(layer, f"{name}_weight")
            delattr(layer, f"{name}_weight_scale")
            layer.register_parameter(f"{name}_weight", torch.nn.Parameter(weights, requires_grad=False))
        process(method, layer)

    return process_weights_after_loading
