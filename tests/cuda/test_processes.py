"""Several processes with a GPU each, started by torch_xla.launch and by torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from flashxla.xla import gpu
from tests.ports import free_port

pytest.importorskip("torch_xla")

STARTS = {
    "launch": [sys.executable, "-m", "tests.cuda.launch_steps", "launch"],
    "torchrun": [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *("-m", "tests.cuda.launch_steps", "torchrun"),
    ],
}


@pytest.mark.parametrize("start", STARTS)
def test_processes_find_each_other(request: pytest.FixtureRequest, start: str) -> None:
    if request.config.option.device != "cuda" or gpu.count(os.environ) < 2:
        pytest.skip("needs two GPUs: --device cuda")
    done = subprocess.run(
        STARTS[start],
        env={
            **os.environ,
            "PJRT_DEVICE": "CUDA",
            "JAX_CUDA_VISIBLE_DEVICES": "0,1",
            "XLA_COORDINATOR_PORT": str(free_port()),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert found["size"] == 2 and found["devices"] == ["GPU:0", "GPU:1"]
    heads = 2 * 64
    assert found["found"] == [[rank, 3, rank + 1, (rank + 1) * heads] for rank in range(2)]
