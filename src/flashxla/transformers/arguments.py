"""What a layer hands its attention function beside queries, keys, values and mask."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

# What models hand their attention function that changes it in ways which the operations do not have. All else that
# comes is for other parts of a model: it hands its call's keyword arguments to its layers and to its loss alike.
# tests/transformers/test_refusals.py looks through transformers' models for more.
REFUSED = ("bias", "block_indices", "indices", "position_bias", "sinks")

# What an error ends with that knows the layer, but not its model.
INSTEAD = 'Load the model with attn_implementation="eager", or with "sdpa" if it supports that'


@dataclasses.dataclass(frozen=True)
class Options:
    """scaling: None is 1 / sqrt(D). sliding_window: how many last keys a query sees, itself among them.

    causal: what the layer says, None if nothing. deterministic: of gradients.
    """

    scaling: float | None
    sliding_window: int | None
    softcap: float | None
    s_aux: torch.Tensor | None
    causal: bool | None
    deterministic: bool

    def flash_attn(self) -> dict[str, Any]:
        """The arguments of flash_attn_varlen_func."""
        side = -1 if self.sliding_window is None else self.sliding_window - 1
        return {
            "softmax_scale": self.scaling,
            "causal": self.causal,
            "window_size": (side, side),
            "softcap": self.softcap or 0.0,
            "s_aux": self.s_aux,
            "deterministic": self.deterministic,
        }

    def ragged_paged(self, head_size: int) -> dict[str, Any]:
        """The same of ragged_paged_attention, for causal attention."""
        return {
            "scale": head_size**-0.5 if self.scaling is None else self.scaling,
            "sliding_window": self.sliding_window,
            "soft_cap": self.softcap,
            "s_aux": self.s_aux,
        }


def options_of(module: Any, arguments: dict[str, Any]) -> Options:
    """The options of a layer's call. Raises ValueError for those that the operations do not have."""
    name = type(module).__name__
    if refused := [argument for argument in REFUSED if arguments.get(argument) is not None]:
        raise ValueError(
            f'attn_implementation="flashxla": {name} hands its attention function {", ".join(refused)}; accepted: '
            'scaling, sliding_window, softcap, s_aux and is_causal. Load the model with attn_implementation="eager"'
        )
    if dropout := arguments.get("dropout"):
        raise ValueError(
            f'attn_implementation="flashxla": {name} has attention dropout {dropout}; accepted: 0.0. Set the '
            "config's attention_dropout to 0.0"
        )
    if arguments.get("output_attentions"):
        raise ValueError(
            'output_attentions: got True with attn_implementation="flashxla", which never makes the weights; '
            'accepted: False, or attn_implementation="eager"'
        )
    causal = arguments.get("is_causal")
    return Options(
        arguments.get("scaling"),
        arguments.get("sliding_window"),
        arguments.get("softcap"),
        arguments.get("s_aux"),
        causal=getattr(module, "is_causal", None) if causal is None else causal,
        deterministic=bool(arguments.get("deterministic")),
    )
