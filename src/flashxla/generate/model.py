"""Loads a checkpoint from a folder and makes the step function that every front end runs."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from flashxla.generate.attention import ATTENTION, Caches, LayerShape, probe_layers
from flashxla.generate.batch import StepInputs
from flashxla.generate.errors import GenerateError
from flashxla.generate.scheduler import Limits

DEFAULT_MODEL = Path(__file__).parent / "default_model"
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
        """The tokens that end a sequence."""
        eos = self.model.generation_config.eos_token_id
        if eos is None:
            eos = self.tokenizer.eos_token_id
        return frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos)

    @property
    def max_positions(self) -> int | None:
        """How long a sequence the model was made for, if it says so."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)


def load(folder: Path, dtype: torch.dtype | str) -> LoadedModel:
    """Load a causal language model and its tokenizer from a folder. Raises GenerateError."""
    model = load_weights(folder, dtype, ATTENTION)
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
    return LoadedModel(model, _load_tokenizer(folder), probe_layers(model))


def load_weights(folder: Path, dtype: torch.dtype | str, attention: str) -> PreTrainedModel:
    """A folder's model, with one of transformers' attention functions. Raises GenerateError."""
    if not (folder / "config.json").is_file():
        raise GenerateError(
            f"--model: got {folder}; accepted: a folder that holds a checkpoint (config.json)"
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=attention, local_files_only=True
        )
    except (ValueError, OSError) as error:
        raise GenerateError(f"--model: {folder} could not be loaded: {error}") from error
    except KeyError as error:
        # Older models look the name up in a table of their own.
        if attention not in error.args:
            raise
        raise GenerateError(
            f"--model: the model in {folder} does not use transformers' attention interface; "
            "accepted: models that do"
        ) from error
    return model.eval()


def move(model: PreTrainedModel, device: torch.device | str) -> PreTrainedModel:
    """The model on another device."""
    # Not PreTrainedModel.to, whose type says that it takes no device.
    torch.nn.Module.to(model, device)
    # Moving to XLA makes new parameters, which unties shared ones.
    model.tie_weights()
    return model


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError) as error:
        raise GenerateError(f"--model: {folder} has no tokenizer that could be loaded: {error}") from error
    # For some models transformers makes an empty tokenizer where the files are missing.
    if not tokenizer("a", add_special_tokens=False).input_ids:
        raise GenerateError(f"--model: {folder} has no tokenizer; accepted: a folder with tokenizer files")
    return tokenizer


def _rope_types(parameters: dict | None) -> set[str]:
    """The rotary embeddings' types: one dictionary, or one for each type of layer."""
    parameters = parameters or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {p["rope_type"] for p in [parameters, *nested] if "rope_type" in p}


def new_caches(layers: list[LayerShape], limits: Limits) -> Caches:
    """Empty key and value caches, one pair a layer, on the CPU."""
    caches = []
    for layer in layers:
        shape = (limits.num_blocks, limits.block_size, layer.num_kv_heads, layer.head_size)
        caches.append((torch.zeros(shape, dtype=layer.dtype), torch.zeros(shape, dtype=layer.dtype)))
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
