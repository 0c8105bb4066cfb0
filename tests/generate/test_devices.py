"""Devices that are not there are named, before anything is loaded, in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashxla.generate import xla_device
from flashxla.generate.errors import GenerateError
from flashxla.xla import pjrt_adapter
from tests.generate.command_line import run_error


def test_a_device_that_xla_does_not_know() -> None:
    # A process of its own: PyTorch/XLA keeps the first device that it starts.
    pytest.importorskip("torch_xla")
    result = subprocess.run(
        [sys.executable, "-m", "flashxla", "generate"],
        env={**os.environ, "PJRT_DEVICE": "NOSUCH"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    start = "flashxla generate: error: PJRT_DEVICE: got 'NOSUCH', which could not be started: RuntimeError: No PjRt"
    assert result.stderr.startswith(start)
    assert result.stderr.count("\n") == 1
    assert result.returncode == 2


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """PJRT_DEVICE=CUDA with a library for it, on a machine without a plugin."""
    pytest.importorskip("torch_xla")
    monkeypatch.setenv("PJRT_DEVICE", "CUDA")
    monkeypatch.delenv(pjrt_adapter.PLUGIN_VARIABLE, raising=False)
    monkeypatch.setattr(pjrt_adapter, "load", pjrt_adapter.load.__wrapped__)
    monkeypatch.setattr(pjrt_adapter, "_PACKAGES", ())

    def refuse() -> None:
        raise AssertionError("a failed start ends the process when it is tried again")

    monkeypatch.setattr("torch_xla.device", refuse)


@pytest.mark.usefixtures("cuda")
def test_no_plugin_for_cuda() -> None:
    with pytest.raises(GenerateError) as error:
        xla_device.start()
    assert str(error.value).startswith(
        "PJRT_DEVICE: got 'CUDA', which could not be started: PyTorch/XLA on NVIDIA GPUs needs JAX's PJRT plugin"
    )
    assert "accepted: CPU, or CUDA where" in str(error.value)


@pytest.mark.usefixtures("cuda")
def test_a_plugin_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = tmp_path / "plugin.so"
    plugin.touch()
    monkeypatch.setenv(pjrt_adapter.PLUGIN_VARIABLE, str(plugin))
    with pytest.raises(GenerateError, match=r"started: the PJRT plugin can't be used: .*file too short"):
        xla_device.start()


@pytest.mark.parametrize(
    ("device", "gpus", "accepted"),
    [
        ("cuda", 0, "cpu (PyTorch sees 0 GPUs)"),
        ("cuda:2", 2, "cpu, cuda, cuda:0, cuda:1 (PyTorch sees 2 GPUs)"),
        ("tpu", 1, "cpu, cuda, cuda:0 (PyTorch sees 1 GPUs)"),
        ("", 0, "cpu (PyTorch sees 0 GPUs)"),
    ],
)
def test_devices_that_torch_lacks(
    device: str, gpus: int, accepted: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr("flashxla.native.library_path", lambda _: Path("libflashxla.so"))
    message = run_error(capsys, "--frontend", "torch", "--device", device)
    assert message == f"--device: got {device!r}; accepted: {accepted}"
