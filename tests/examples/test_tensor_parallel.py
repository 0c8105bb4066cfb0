"""The tensor-parallel example writes the same tokens on one device and on two, whose heads it divides."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "tensor_parallel_jax.py"


def lines(devices: int) -> list[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--tokens", "24"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_jax() -> None:
    one, two = lines(1), lines(2)
    assert one[0] == "1 devices; collectives of a step: none"
    assert two[0] == "2 devices; collectives of a step: 8 all-reduce"  # two for each of four layers
    assert one[1:5] == two[1:5]
    assert all(len(line.split()) == 26 for line in one[1:5])
    assert two[-1].endswith("the caches stayed in their buffers")
