"""What flashxla doctor says of plain PyTorch on a CPU."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import flashxla.torch as fx
from flashxla.doctor import cli, decoding, probe
from flashxla.doctor.finding import Finding


def test_in_place() -> None:
    result = probe.run("torch_cpu", layers=4, steps=4)
    assert result.in_place and result.device == "cpu"


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_exact_enough_with_other_instructions(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if isa == "avx2" and not torch.cpu._is_avx2_supported():
        pytest.skip("this processor has no AVX2")
    monkeypatch.setenv("FLASHXLA_CPU_ISA", isa)
    assert probe.run("torch_cpu").in_place


def test_a_write_that_is_lost_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is held against a reference of its own, not against itself."""
    write = fx.reshape_and_cache_flash

    def lost(key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any) -> None:
        write(key, value, key_cache.clone(), value_cache.clone(), slots)

    sizes = decoding.Sizes(layers=2, steps=3, blocks=16)
    assert decoding.decode("torch_cpu", sizes).largest_error < 1e-5
    monkeypatch.setattr(fx, "reshape_and_cache_flash", lost)
    assert decoding.decode("torch_cpu", sizes).largest_error > 0.1


def test_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    on_cpu, on_gpu = cli._plain_torch()
    assert on_cpu.topic == "in place: torch on cpu" and on_cpu.ok
    assert on_cpu.text.startswith("on cpu: the pointers stayed over 3 layers x 3 steps; largest error")
    assert on_gpu == Finding("in place: torch on cuda", None, "torch sees no GPU")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert list(cli._plain_torch()) == [Finding("in place: torch on cpu", None, "torch is not installed")]
