"""Gradients of whole models, against transformers' own eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.transformers.conftest import Make
from tests.transformers.test_models import LENGTH, MASKS, ids_of


def gradients(model: Any, name: str, **arguments: Any) -> dict[str, torch.Tensor]:
    model.set_attn_implementation(name)
    model.zero_grad()
    model(use_cache=False, **arguments).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        difference = (gradient - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-6)
        assert difference < tolerance, (name, difference)


@pytest.mark.parametrize("mask", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2"])
def test_padded(make_model: Make, family: str, mask: str) -> None:
    model = make_model(family).train()
    tokens = torch.tensor(MASKS[mask] or [[1] * LENGTH] * 3)
    # Not what padding predicts, which eager attention lets see something.
    wanted = tokens.bool() & tokens.roll(1, dims=1).bool()
    labels = torch.where(wanted, ids_of(), -100)
    positions = (tokens.cumsum(1) - 1).clamp(min=0)
    arguments: dict[str, Any] = {"input_ids": ids_of(), "labels": labels, "position_ids": positions}
    if MASKS[mask] is not None:
        arguments["attention_mask"] = tokens
    expected = gradients(model, "eager", **arguments)
    assert_close(gradients(model, "flashxla", **arguments), expected, 1e-3)


def test_packed(make_model: Make) -> None:
    model = make_model("mistral").train()
    positions = torch.cat([torch.arange(n) for n in (5, 9, 7)])[None].expand(3, -1)
    arguments = {"input_ids": ids_of(), "labels": ids_of(), "position_ids": positions}
    expected = gradients(model, "eager", **arguments)
    assert_close(gradients(model, "flashxla", **arguments), expected, 1e-3)


def test_checkpointed_under_autocast(make_model: Make, device: str) -> None:
    """As exact as eager attention under autocast."""
    model = make_model("llama").train()
    arguments = {"input_ids": ids_of(), "labels": ids_of()}
    exact = gradients(model, "eager", **arguments)
    model.gradient_checkpointing_enable()
    with torch.autocast(device, torch.bfloat16):
        theirs, ours = (gradients(model, name, **arguments) for name in ("eager", "flashxla"))
    for name, expected in exact.items():
        assert (ours[name] - expected).norm() < 1.5 * (theirs[name] - expected).norm(), name
