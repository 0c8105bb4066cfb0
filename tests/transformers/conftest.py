"""Models of a dozen families."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

import flashxla.transformers
from tests.generate.checkpoints import COMMON, CONFIGS
from tests.tiny_models import no_compiled_code, one_thread  # noqa: F401

flashxla.transformers.enable()

_MORE = {
    "llama": lambda: transformers.LlamaConfig(**COMMON),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **COMMON, sliding_window=7, layer_types=["sliding_attention", "full_attention"]
    ),
    "phi3": lambda: transformers.Phi3Config(**COMMON),
    "olmo2": lambda: transformers.Olmo2Config(**COMMON),
    "starcoder2": lambda: transformers.Starcoder2Config(**COMMON, sliding_window=7),
}
FAMILIES = {**CONFIGS, **_MORE}

Make = Callable[..., Any]


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where tensors and models are made that name no device: --device."""
    name = request.config.option.device
    # Not set_default_device: in PyTorch 2.9 get_default_device fails after it was taken back.
    with torch.device(name):
        yield name


def drawn(function: Callable[..., torch.Tensor], seed: int, *args: Any) -> torch.Tensor:
    """What torch.randint, randn or rand draws: the same numbers on every device."""
    numbers = function(*args, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return numbers.to(torch.get_default_device())


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
