"""What a layer hands its attention function beside queries, keys, values and mask."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

# They change nothing here: what a model's outputs hold, and what its layers have used already. read_index and the like
# are continuous batching's.
_HARMLESS = {
    "block_table",
    "cache_position",
    "deterministic",
    "logits_indices",
    "logits_processor_args",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_embeddings",
    "read_index",
    "return_dict",
    "seq_idx",
    "use_cache",
    "write_index",
}


@dataclasses.dataclass(frozen=True)
class Options:
    """scaling: None is 1 / sqrt(D). sliding_window: how many last keys a query sees, itself among them."""

    scaling: float | None
    sliding_window: int | None
    softcap: float | None
    s_aux: torch.Tensor | None
    causal: bool

    def flash_attn(self) -> dict[str, Any]:
        """The arguments of flash_attn_varlen_func."""
        side = -1 if self.sliding_window is None else self.sliding_window - 1
        return {
            "softmax_scale": self.scaling,
            "causal": self.causal,
            "window_size": (side, side),
            "softcap": self.softcap or 0.0,
            "s_aux": self.s_aux,
        }


def options_of(module: Any, arguments: dict[str, Any]) -> Options:
    """The options of a layer's call. Raises ValueError for those that the operations do not have."""
    given = {name: value for name, value in arguments.items() if value is not None and name not in _HARMLESS}
    causal = given.pop("is_causal", getattr(module, "is_causal", True))
    options = Options(
        **{name: given.pop(name, None) for name in ("scaling", "sliding_window", "softcap", "s_aux")},
        causal=causal,
    )
    refused = {name: value for name, value in given.items() if name not in ("dropout", "output_attentions")}
    if refused:
        raise ValueError(
            f'attn_implementation="flashxla": {type(module).__name__} hands its attention function '
            f"{', '.join(sorted(refused))}; accepted: scaling, sliding_window, softcap, s_aux and is_causal. Load the "
            'model with attn_implementation="eager"'
        )
    if given.get("dropout"):
        raise ValueError(
            f'attn_implementation="flashxla": {type(module).__name__} has attention dropout {given["dropout"]}; '
            "accepted: 0.0. Set the config's attention_dropout to 0.0"
        )
    if given.get("output_attentions"):
        raise ValueError(
            'output_attentions: got True with attn_implementation="flashxla", which never makes the weights; '
            'accepted: False, or attn_implementation="eager"'
        )
    return options
