"""Looks at what a model's layers hand their attention function, and what their caches must hold."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from transformers import AttentionInterface, PreTrainedModel

from flashxla import transformers
from flashxla.generate.batch import one_token
from flashxla.generate.errors import GenerateError, describe
from flashxla.transformers import own_cache

transformers.enable()
ATTENTION = transformers.OWN_CACHE
PROBE = "fx_probe"

_MEANINGFUL_ARGUMENTS = ("scaling", "sliding_window", "softcap", "s_aux")
# Those, and what changes nothing here: no dropout in inference, positions are in the keys already.
_KNOWN_ARGUMENTS = {
    *_MEANINGFUL_ARGUMENTS,
    "dropout",
    "flashxla_calls",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "use_cache",
}


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """What a layer's cache must hold: keys of head_size, values of value_size."""

    num_kv_heads: int
    head_size: int
    value_size: int
    dtype: torch.dtype

    def block_shapes(self, block_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of one block of keys, and of values."""
        tokens = block_size, self.num_kv_heads
        return (*tokens, self.head_size), (*tokens, self.value_size)


def _probe(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    calls: dict[int, _LayerCall] | None = kwargs.get("flashxla_calls")
    name = type(module).__name__
    if calls is None:
        raise GenerateError(f"--model: {name} does not pass keyword arguments on to its attention function")
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise GenerateError(f"--model: {name} is not causal; accepted: models that generate left to right")
    unknown = sorted(k for k, v in kwargs.items() if v is not None and k not in _KNOWN_ARGUMENTS)
    if attention_mask is not None:
        unknown.append("attention_mask")
    if unknown:
        raise GenerateError(
            f"--model: {name} hands its attention function {', '.join(unknown)}; "
            f"accepted: {', '.join(_MEANINGFUL_ARGUMENTS)}"
        )
    arguments = {k: kwargs.get(k) for k in _MEANINGFUL_ARGUMENTS}
    calls[module.layer_idx] = _LayerCall(module, query, key, value, arguments)
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None


@dataclasses.dataclass(frozen=True)
class _LayerCall:
    """What a layer handed its attention function."""

    module: Any
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    arguments: dict[str, Any]

    @torch.no_grad()
    def check(self) -> LayerShape:
        """Attend once, with a cache of one block. Raises GenerateError for what the ops do not take."""
        shape = LayerShape(self.key.shape[1], self.key.shape[-1], self.value.shape[-1], self.key.dtype)
        keys, values = (self.key.new_zeros((1, *block)) for block in shape.block_shapes(1))
        caches = [(keys, values)] * (self.module.layer_idx + 1)
        step = one_token().to(self.key.device)
        try:
            own_cache.attention(
                self.module,
                self.query,
                self.key,
                self.value,
                None,
                flashxla_step=step,
                flashxla_caches=caches,
                **self.arguments,
            )
        except ValueError as error:
            raise GenerateError(f"--model: {type(self.module).__name__}: {error}") from error
        return shape


def probe_layers(model: PreTrainedModel) -> list[LayerShape]:
    """What each layer's cache must hold, seen in a forward pass of one token.

    Raises GenerateError for a model that the ops cannot run.
    """
    try:
        calls = _compute_one_token(model)
    except GenerateError:
        raise
    except Exception as error:
        # A config.json can hold numbers that do not fit together, and a model need not take what this one is given.
        raise GenerateError(
            f"--model: {type(model).__name__} could not compute one token: {describe(error)}"
        ) from error
    layers = model.config.get_text_config().num_hidden_layers
    if layers < 1 or sorted(calls) != list(range(layers)):
        raise GenerateError(
            f"--model: {len(calls)} of the {layers} layers of {type(model).__name__} use transformers' "
            "attention interface; accepted: models in which all do"
        )
    return [calls[layer].check() for layer in range(layers)]


def check_one_program(model: PreTrainedModel, frontend: str) -> None:
    """Raise GenerateError for a model that looks at values to decide what it computes: XLA cannot compile it."""
    try:
        # Fake tensors have shapes and no values.
        with FakeTensorMode(allow_non_fake_inputs=True):
            _compute_one_token(model)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise GenerateError(
            f"--frontend: got {frontend} with {type(model).__name__}, which decides by values what it computes "
            f"({error.func}); accepted: --frontend torch with this model"
        ) from error


@torch.no_grad()
def _compute_one_token(model: PreTrainedModel) -> dict[int, _LayerCall]:
    """Run the model without attention. Returns how each layer called it."""
    calls: dict[int, _LayerCall] = {}
    model.set_attn_implementation(PROBE)
    token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    model(input_ids=token, position_ids=token, use_cache=False, flashxla_calls=calls)
    model.set_attn_implementation(ATTENTION)
    return calls


AttentionInterface.register(PROBE, _probe)
