"""Refuses models that the ops cannot run, and makes the step function that every front end runs."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from flashxla.generate.attention import ATTENTION, LayerShape, check_one_program, probe_layers
from flashxla.generate.batch import StepInputs
from flashxla.generate.checkpoint import Checkpoint, some
from flashxla.generate.errors import GenerateError, describe, warn
from flashxla.generate.experts import EXPERTS
from flashxla.generate.scheduler import Limits
from flashxla.transformers.own_cache import Caches

# Masks that the ops cannot express are no option to leave out silently.
_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Rotary embeddings that look at the batch's longest sequence: a token's value would depend on its neighbours.
_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}
# Without them a packed batch cannot be told apart, or would be answered with the wrong rows.
_NEEDED_ARGUMENTS = {"position_ids", "logits_to_keep"}


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A checkpoint, ready to generate."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    layers: list[LayerShape]

    @property
    def eos_tokens(self) -> frozenset[int]:
        """The tokens that end a sequence. Raises GenerateError."""
        eos: Any = self.model.generation_config.eos_token_id
        if eos is None:
            eos = self.tokenizer.eos_token_id
        tokens = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not all(isinstance(token, int) for token in tokens):
            raise GenerateError(
                f"--model: got eos_token_id {eos!r} in its generation_config.json; accepted: numbers of tokens"
            )
        return frozenset(tokens)

    @property
    def max_positions(self) -> int | None:
        """How long a sequence the model was made for, if it says so."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)


def load(checkpoint: Checkpoint, frontend: str) -> LoadedModel:
    """Load a causal language model and its tokenizer from a folder. Raises GenerateError."""
    for_xla = frontend != "torch"
    # Without XLA transformers itself knows best how to compute experts.
    model, unused = checkpoint.load_model(ATTENTION, EXPERTS if for_xla else None)
    folder = checkpoint.folder
    if unused:
        # All that the model needs is there. Still, a config.json that leaves something out may be wrong.
        warn(f"--model: {folder} has tensors that its model does not use: {some(unused)}")
    config = model.config.get_text_config()
    unknown = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if unknown:
        raise GenerateError(
            f"--model: {folder} has layers of type {', '.join(sorted(unknown))}; "
            f"accepted: {', '.join(sorted(_LAYER_TYPES))}"
        )
    rope = _rope_types(getattr(config, "rope_parameters", None)) & _BATCH_DEPENDENT_ROPE
    if rope:
        raise GenerateError(
            f"--model: {folder} has rotary embeddings of type {', '.join(sorted(rope))}, which depend on the "
            "longest sequence of a batch; accepted: all other types"
        )
    missing = _NEEDED_ARGUMENTS - set(inspect.signature(model.forward).parameters)
    if missing:
        raise GenerateError(
            f"--model: {type(model).__name__} takes no {', '.join(sorted(missing))}; accepted: models that do"
        )
    layers = probe_layers(model)
    if for_xla:
        check_one_program(model, frontend)
    return LoadedModel(model, checkpoint.load_tokenizer(), layers)


def encode(loaded: LoadedModel, number: int, prompt: str) -> list[int]:
    """The tokens of a prompt. Raises GenerateError for a tokenizer that is damaged or of another model."""
    try:
        tokens = loaded.tokenizer(prompt).input_ids
    except Exception as error:
        raise GenerateError(
            f"--model: its tokenizer could not encode prompt {number}: {describe(error)}"
        ) from error
    return known_tokens(loaded, number, tokens)


def encode_chat(loaded: LoadedModel, number: int, prompt: str, system: str | None) -> list[int]:
    """The tokens of a user's message, up to where the model answers. Raises GenerateError."""
    if not loaded.tokenizer.chat_template:
        raise GenerateError("--chat: got a model without a chat template; accepted: models that have one")
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    try:
        tokens: Any = loaded.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
    except Exception as error:
        raise GenerateError(
            f"--chat: the model's chat template could not take prompt {number}: {describe(error)}"
        ) from error
    return known_tokens(loaded, number, list(tokens))


def known_tokens(loaded: LoadedModel, number: int, tokens: list[int]) -> list[int]:
    """The tokens of a prompt, if the model knows them. Raises GenerateError."""
    embeddings: Any = loaded.model.get_input_embeddings()
    size = embeddings.weight.shape[0]
    if max(tokens, default=0) >= size:
        raise GenerateError(
            f"--model: its tokenizer makes token {max(tokens)} of prompt {number}; accepted: tokens below {size}, "
            "which is how many the model has"
        )
    return tokens


def move(model: PreTrainedModel, device: torch.device | str) -> PreTrainedModel:
    """The model on another device."""
    # Not PreTrainedModel.to, whose type says that it takes no device.
    torch.nn.Module.to(model, device)
    # Moving to XLA makes new parameters, which unties shared ones.
    model.tie_weights()
    return model


def _rope_types(parameters: dict | None) -> set[str]:
    """The rotary embeddings' types: one dictionary, or one for each type of layer."""
    parameters = parameters or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {p["rope_type"] for p in [parameters, *nested] if "rope_type" in p}


def new_caches(layers: list[LayerShape], limits: Limits, device: torch.device | str) -> Caches:
    """Empty key and value caches, one pair a layer."""
    caches = []
    for layer in layers:
        keys, values = (
            torch.zeros((limits.num_blocks, *block), dtype=layer.dtype, device=device)
            for block in layer.block_shapes(limits.block_size)
        )
        caches.append((keys, values))
    return caches


def run_step(model: PreTrainedModel, inputs: StepInputs, caches: Caches) -> torch.Tensor:
    """One forward pass over packed tokens. Returns the logits [S, V] of each sequence's last token."""
    output = model(
        input_ids=inputs.input_ids,
        position_ids=inputs.position_ids,
        use_cache=False,
        logits_to_keep=inputs.logits_rows,
        flashxla_step=inputs,
        flashxla_caches=caches,
    )
    return output.logits[0]
