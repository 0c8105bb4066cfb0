"""What the operations cannot express is an error that says so."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.masking_utils import (
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    or_masks,
)

import flashxla.transformers
from flashxla.transformers import continuous_batching, interface, masks
from flashxla.transformers.arguments import REFUSED
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
        r"LlamaAttention got a mask \[3, 1, 21, 21\] of torch.bool for 21 queries .*; accepted: None, \[batch, keys\]",
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


# What transformers' models hand their attention functions, and has its place here or means nothing to attention.
EXPECTED = [
    "query",
    "key",
    "value",
    "attention_mask",
    "position_ids",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "scaling",
    "dropout",
    "is_causal",
    "sliding_window",
    "softcap",
    "s_aux",
    "output_attentions",
    "deterministic",
]


def up_to_its_end(source: str, start: int) -> str:
    """The call that begins here."""
    depth = 0
    for match in re.finditer(r"[()]", source[start:]):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return source[start : start + match.end()]
    raise AssertionError("no end")


def test_what_models_hand_their_attention() -> None:
    """An argument that is new in transformers must be looked at: it may change what attention is."""
    found: dict[str, str] = {}
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        source = path.read_text(encoding="utf-8")
        for match in re.finditer(r" (attention_interface\()", source):
            call = ast.parse(up_to_its_end(source, match.start(1)), mode="eval").body
            assert isinstance(call, ast.Call)
            found |= {keyword.arg: path.name for keyword in call.keywords if keyword.arg}
    assert {"scaling", "s_aux"} < found.keys()
    assert {name: where for name, where in found.items() if name not in (*EXPECTED, *REFUSED)} == {}


def test_arguments_of_the_loss(model: Any) -> None:
    """A model hands them to its layers, too."""
    ids = ids_of()
    expected = model(ids, labels=ids).loss
    shifted = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
    torch.testing.assert_close(model(ids, labels=ids, shift_labels=shifted, ignore_index=-100).loss, expected)


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


def test_models_that_compute_with_their_mask() -> None:
    """They ask transformers for a tensor of queries and keys even where attention needs none."""
    config = transformers.DogeConfig(
        vocab_size=259, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="flashxla")
    for arguments in ({}, {"attention_mask": torch.ones_like(ids_of())}):
        with pytest.raises(
            ValueError, match=r"asks for a mask with a place for each query .*; accepted: causal"
        ):
            model(ids_of(), **arguments)
    with pytest.raises(ValueError, match="with a place for each query"):
        masks.spans(1, 4, 4, mask_function=bidirectional_mask_function, allow_is_bidirectional_skip=False)


@pytest.mark.parametrize("family", ["Falcon", "Bloom", "GPTJ", "Mpt"])
def test_models_without_the_interface(family: str) -> None:
    sizes = {"vocab_size": 259, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = getattr(transformers, f"{family}Config")(
        **sizes, **({"rotary_dim": 4} if family == "GPTJ" else {})
    )
    message = (
        rf'attn_implementation: got "flashxla" for {family}ForCausalLM, whose attention does not go through'
    )
    with pytest.raises(ValueError, match=message):
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="flashxla")
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name in ("flashxla", {"": "flashxla"}):
        with pytest.raises(ValueError, match=message):
            model.set_attn_implementation(name)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("family", ["Splinter", "ClapText", "AlignText", "BigBirdPegasus", "DeepseekV4"])
def test_models_that_support_no_other(family: str) -> None:
    """Neither PyTorch's attention nor flash attention: their layers need a mask of queries and keys."""
    kind = getattr(transformers, f"{family}Model")
    message = rf'attn_implementation: got "flashxla" for {family}Model, which supports neither .*; accepted: .*"eager"'
    with pytest.raises(ValueError, match=message):
        kind._from_config(kind.config_class(), attn_implementation="flashxla")


def test_parts_that_support_no_other(make_model: Make) -> None:
    """A part whose config is its own is asked when the whole model's attention is set."""
    model = make_model("llama")
    config = transformers.SplinterConfig(
        vocab_size=259, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    model.part = transformers.SplinterModel(config)
    with pytest.raises(ValueError, match=r'got "flashxla" for SplinterModel, which supports neither'):
        model.set_attn_implementation("flashxla")


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
