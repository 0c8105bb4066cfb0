"""Models of a dozen families, and what keeps tests apart."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

import flashxla.transformers
from tests.generate.checkpoints import CONFIGS

flashxla.transformers.enable()

_SHAPE = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 258,
    "initializer_range": 0.3,
}
_MORE = {
    "llama": lambda: transformers.LlamaConfig(**_SHAPE),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_SHAPE, head_dim=16, sliding_window=7, layer_types=["sliding_attention", "full_attention"]
    ),
    "phi3": lambda: transformers.Phi3Config(**_SHAPE),
    "olmo2": lambda: transformers.Olmo2Config(**_SHAPE),
    "starcoder2": lambda: transformers.Starcoder2Config(**_SHAPE, sliding_window=7),
}
FAMILIES = {**CONFIGS, **_MORE}

Make = Callable[..., Any]


@pytest.fixture
def make_model() -> Make:
    """A function that makes a model of a family, or of a config."""

    def make(family: Any, kind: Any = transformers.AutoModelForCausalLM) -> Any:
        torch.manual_seed(0)
        model = kind.from_config(FAMILIES[family]() if isinstance(family, str) else family).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                torch.nn.init.normal_(parameter, mean=1.0)
        return model

    return make


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    # The models are tiny: with more threads their time goes into waking threads.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def no_compiled_code() -> Iterator[None]:
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
