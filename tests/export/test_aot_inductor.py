"""torch.export and AOTInductor: the example runs, and another process runs its package without the model's code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples/aot_inductor.py"
LOAD = """
import runpy, sys
import torch
import flashxla.torch

step = torch._inductor.aoti_load_package(sys.argv[2])
new_arguments = runpy.run_path(sys.argv[1])["new_arguments"]
arguments, before = new_arguments(), new_arguments()
step(*arguments)
changed = [(new != old).any(-1).any(-1).sum().item() for new, old in zip(arguments[1:3], before[1:3])]
assert changed == [3, 3], changed
"""


def test_the_example_and_its_package(tmp_path: Path) -> None:
    package = str(tmp_path / "step.pt2")
    environment = os.environ | {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
    }
    for command in ([str(EXAMPLE), "--package", package], ["-c", LOAD, str(EXAMPLE), package]):
        done = subprocess.run(
            [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr[-3000:]
    assert "Error" not in done.stderr
