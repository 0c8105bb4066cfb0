"""The programs of docs/training.md run as they are printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    ("number", "printed"), [(0, "torch.Size([16, 8, 64])"), (1, "(16, 8, 64)"), (2, "(64, 8, 64)")]
)
def test_program(number: int, printed: str) -> None:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    done = subprocess.run(
        [sys.executable, "-c", BLOCKS[number]], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == printed


def test_no_program_is_left_out() -> None:
    assert len(BLOCKS) == 3
