"""For programs that hold the paged cache themselves: a layer writes its new keys into it, and attends to all of it."""

from __future__ import annotations

from typing import Any, Protocol

import torch

import flashxla.torch as fx
from flashxla.transformers.arguments import options_of

# A pair of caches for each layer: [P, B, Hk, D] and [P, B, Hk, Dv].
Caches = list[tuple[torch.Tensor, torch.Tensor]]


class Step(Protocol):
    """What a step's layers share: arguments of ragged_paged_attention, by their names there."""

    @property
    def context_lens(self) -> torch.Tensor:
        """int32 [S]."""

    @property
    def block_tables(self) -> torch.Tensor:
        """int32 [S, M]."""

    @property
    def query_start_loc(self) -> torch.Tensor:
        """int32 [S+1]."""

    @property
    def num_seqs(self) -> torch.Tensor:
        """int32 [1]."""


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    flashxla_step: Step,
    flashxla_caches: Caches,
    position_ids: torch.Tensor | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """A layer's attention over the caches that the model's call was given.

    Args:
        module: the layer.
        query, key, value: [1, heads, T, head size], the step's packed tokens.
        attention_mask: None.
        flashxla_step, flashxla_caches: keyword arguments of the model's call.
        position_ids: of the tokens; the layer has used them already.
        arguments: see arguments.Options.

    Returns:
        [1, T, Hq, Dv], and None in place of the weights.
    """
    options = options_of(module, arguments)
    query, key, value = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    out: Any = fx.ragged_paged_attention(
        query,
        key,
        value,
        flashxla_caches[module.layer_idx],
        flashxla_step.context_lens,
        flashxla_step.block_tables,
        flashxla_step.query_start_loc,
        flashxla_step.num_seqs,
        **options.ragged_paged(query.shape[-1]),
    )
    return out[None], None
