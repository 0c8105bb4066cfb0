"""jit divides calls over devices by the shardings of their arguments: no gather, no copy of a cache; or a warning."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from flashxla.xla import gpu


@pytest.mark.parametrize("axes", ["auto", "explicit"])
@pytest.mark.parametrize("part", ["decoding", "gradients", "random", "warnings"])
def test_sharded_arguments(request: pytest.FixtureRequest, part: str, axes: str) -> None:
    """On four virtual CPU devices, or four GPUs."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if request.config.option.device == "cpu":
        environment.update(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=4")
    elif gpu.count(os.environ) < 4:
        pytest.skip("needs four GPUs")
    seed = str(request.config.option.seed)
    done = subprocess.run(
        [sys.executable, "-m", "tests.xla.sharding_steps", part, axes, seed],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
