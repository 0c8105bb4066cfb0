"""What the operations cannot express is an error that says so."""

from __future__ import annotations

import subprocess
import sys
import types
from typing import Any

import pytest
import torch
import transformers
from transformers.masking_utils import blockwise_overlay, causal_mask_function, or_masks

import flashxla.transformers
from flashxla.transformers import continuous_batching, interface, masks
from tests.transformers.conftest import Make
from tests.transformers.test_models import ids_of


@pytest.fixture
def model(make_model: Make) -> Any:
    model = make_model("llama")
    model.set_attn_implementation("flashxla")
    return model


TABLE: dict[str, tuple[dict[str, Any], str]] = {
    "attention_mask": (
        {"attention_mask": torch.ones(3, 1, 21, 21, dtype=torch.bool)},
        r"got an attention_mask \[3, 1, 21, 21\]; accepted: None or \[batch, keys\]",
    ),
    "an argument": (
        {"position_bias": torch.zeros(1)},
        r"LlamaAttention hands its attention function position_bias; accepted: scaling, sliding_window,",
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_arguments(model: Any, case: str) -> None:
    arguments, message = TABLE[case]
    with pytest.raises(ValueError, match='attn_implementation="flashxla": .*' + message):
        model(ids_of(), **arguments)


def test_dropout(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    model(ids_of())
    with pytest.raises(ValueError, match=r"LlamaAttention has attention dropout 0.1; accepted: 0.0"):
        model.train()(ids_of())


def test_weights(model: Any) -> None:
    layer, q = model.model.layers[0].self_attn, torch.zeros(1, 4, 3, 16)
    with pytest.raises(ValueError, match=r"output_attentions: got True .* accepted: False"):
        interface.attention(layer, q, q, q, None, output_attentions=True)


def test_masks_of_other_kinds() -> None:
    """Images whose tokens all see each other, for one."""
    overlay = or_masks(causal_mask_function, blockwise_overlay(torch.zeros(1, 4)))
    with pytest.raises(
        ValueError, match=r"asks for a mask with or_masks.*; accepted: causal masks, sliding windows"
    ):
        masks.spans(1, 4, 4, mask_function=overlay)


def test_models_without_the_interface() -> None:
    config = transformers.FalconConfig(
        vocab_size=259, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    message = (
        r'attn_implementation: got "flashxla" for FalconForCausalLM, whose attention does not go through'
    )
    with pytest.raises(ValueError, match=message):
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="flashxla")


@pytest.mark.parametrize(
    ("cache", "got"),
    [
        (types.SimpleNamespace(), "no cache_allocators, layer_to_allocator"),
        (
            types.SimpleNamespace(cache_allocators={}, layer_to_allocator={0: 1}),
            "allocators without cache_tensor",
        ),
    ],
)
def test_other_paged_caches(model: Any, cache: Any, got: str) -> None:
    q = torch.zeros(1, 4, 3, 16)
    step = continuous_batching.Step(cache, torch.tensor([0, 3]), {}, 3, {}, {})
    with pytest.raises(
        ValueError, match=rf"the paged cache of transformers .* has {got}.*; accepted: continuous"
    ):
        continuous_batching.attention(model.model.layers[0].self_attn, q, q, q, step, None)  # type: ignore[arg-type]


def test_command_line_of_transformers() -> None:
    """`transformers serve` takes this name, and knows it once ours is enabled."""
    from transformers.cli.serving.model_manager import ModelManager

    assert flashxla.transformers.KERNEL_NAME in transformers.AttentionInterface._global_mapping
    ModelManager(attn_implementation=flashxla.transformers.KERNEL_NAME)
    command = [sys.executable, "-m", "flashxla.transformers", "serve", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "--attn-implementation" in done.stdout, done.stderr
