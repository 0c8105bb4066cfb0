"""Mixtures of experts with fixed shapes, through transformers' own experts interface.

transformers' other ways to run the experts look at the values of the routing: XLA has no programs for that.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward

EXPERTS = "fx_experts"


def experts_forward(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts' weighted sum for each token, in the way that moves fewer weights.

    hidden_states: [T, H]. top_k_index, top_k_weights: [T, K].
    """
    # transformers' function copies an expert's weights for each token that goes there.
    if top_k_index.numel() <= experts.num_experts:
        return batched_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
    return _all_experts(experts, hidden_states, top_k_index, top_k_weights)


def _all_experts(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Every expert for every token, of which each token takes its own: more products, but no weights copied."""
    projection = "gate_up_proj" if experts.has_gate else "up_proj"
    inner = _linear(experts, projection, hidden_states)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    outputs = _linear(experts, "down_proj", inner)  # [E, T, H]
    index = top_k_index[..., None].long()  # torchax's topk gives int32
    chosen = outputs.transpose(0, 1).take_along_dim(index, dim=1)  # [T, K, H]
    # transformers 5.17 does not have this norm.
    if getattr(experts, "has_post_expert_norm", False):
        chosen = experts.post_expert_norm(chosen)
    return (chosen * top_k_weights[..., None]).sum(dim=1).to(hidden_states.dtype)


def _linear(experts: Any, name: str, inputs: torch.Tensor) -> torch.Tensor:
    weight = getattr(experts, name)
    outputs = inputs @ (weight if experts.is_transposed else weight.transpose(1, 2))
    return outputs + getattr(experts, f"{name}_bias")[:, None] if experts.has_bias else outputs


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)
