"""Several processes, each with a device of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from flashxla.xla import gpu


def test_two_processes():
    if os.environ.get("PJRT_DEVICE") == "CUDA" and gpu.count(os.environ) < 2:
        pytest.skip("needs 2 GPUs")
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("-m", "tests.torchtpu.process_steps"),
        ],
        env=os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
    assert ended.stdout.count(": done") == 2
