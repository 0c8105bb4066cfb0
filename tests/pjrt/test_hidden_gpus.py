"""Hiding GPUs from CUDA, for TorchTPU."""

from __future__ import annotations

import os
from typing import Any

import pytest

from flashxla.xla import hidden_gpus, torch_tpu


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(hidden_gpus, "_cuda_runs", lambda: False)
    return monkeypatch


@pytest.mark.parametrize(
    ("before", "devices", "after"),
    [
        (None, [1], "1"),
        (None, [3, 0], "3,0"),
        ("4,6", [1], "6"),
        ("GPU-8c1f,GPU-02ab", [1], "GPU-02ab"),
    ],
)
def test_the_variable(
    environment: pytest.MonkeyPatch, before: str | None, devices: list[int], after: str
) -> None:
    if before is not None:
        environment.setenv("CUDA_VISIBLE_DEVICES", before)
    hidden_gpus.hide_others("use_gpu", devices)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == after


def test_a_gpu_that_is_hidden_already(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    with pytest.raises(
        ValueError, match=r"use_gpu: visible_devices: got \[2\]; accepted: numbers below 2, as"
    ):
        hidden_gpus.hide_others("use_gpu", [2])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,6"


def test_too_late(environment: pytest.MonkeyPatch) -> None:
    environment.setattr(hidden_gpus, "_cuda_runs", lambda: True)
    with pytest.raises(
        RuntimeError, match=r"use_gpu: CUDA runs in this process already.* set CUDA_VISIBLE_DEVICES to 1,2 "
    ):
        hidden_gpus.hide_others("use_gpu", [1, 2])
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


@pytest.mark.parametrize(
    ("options", "left", "variable"),
    [
        ({"memory_fraction": 0.5}, {"memory_fraction": 0.5}, None),
        ({"visible_devices": [0]}, {"visible_devices": [0]}, None),
        ({"visible_devices": [0, 1]}, {"visible_devices": [0, 1]}, None),
        ({"visible_devices": [1], "preallocate": True}, {"preallocate": True}, "1"),
        ({"visible_devices": [1, 0]}, {}, "1,0"),
    ],
    ids=str,
)
def test_torch_tpu_gets_gpus_by_their_places(
    environment: pytest.MonkeyPatch, options: dict[str, Any], left: dict[str, Any], variable: str | None
) -> None:
    jax = pytest.importorskip("jax")
    asked: list[tuple[str, str]] = []
    environment.setattr(jax.config, "update", lambda *option: asked.append(option))
    assert torch_tpu._numbered_from_0("use_gpu", options) == left
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == variable
    assert asked == ([("jax_cuda_visible_devices", "all")] if variable else [])
