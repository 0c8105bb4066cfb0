"""The training examples run as they are documented, and their loss falls."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ("--rows", "2", "--tokens", "256")


def losses(example: str, *options: str, devices: int = 1) -> dict[int, float]:
    """Run an example; returns the loss of each step that it printed."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PJRT_DEVICE": "CPU"}
    environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / example), *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"^step (\d+) +loss ([\d.]+)", done.stdout, flags=re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


def test_torch() -> None:
    eager = losses("train_torch.py", *SMALL, "--steps", "41")
    assert eager[0] > 5.3
    assert eager[40] < 3.6
    if importlib.util.find_spec("torch_xla") is None:
        pytest.skip("needs torch_xla")
    compiled = losses("train_torch.py", *SMALL, "--steps", "21", "--backend", "openxla")
    assert compiled == pytest.approx({step: eager[step] for step in (0, 10, 20)}, abs=5e-3)


def test_jax(tmp_path: Path) -> None:
    """On one device and on a mesh of eight, and stopped and gone on: the same losses."""
    pytest.importorskip("optax")
    one = losses("train_jax.py", *SMALL, "--steps", "41")
    assert one[0] > 5.3
    assert one[40] < 3.6
    mesh = (*SMALL, "--mesh", "2", "2", "2", "--checkpoint", str(tmp_path / "checkpoint"))
    assert losses("train_jax.py", *mesh, "--steps", "11", devices=8) == pytest.approx(
        {step: one[step] for step in (0, 10)}, abs=5e-3
    )
    assert losses("train_jax.py", *mesh, "--steps", "21", devices=8)[20] == pytest.approx(one[20], abs=5e-3)
