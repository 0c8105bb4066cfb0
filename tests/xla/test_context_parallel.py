"""Attention over keys that are spread over devices: ring attention, and decoding with merged results."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from flashxla import jax as fx
from flashxla.xla import gpu


@pytest.mark.parametrize("devices", [2, 4])
def test_over_devices(request: pytest.FixtureRequest, devices: int) -> None:
    """On virtual CPU devices, or on so many GPUs."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if request.config.option.device == "cpu":
        count = f"--xla_force_host_platform_device_count={devices}"
        environment.update(JAX_PLATFORMS="cpu", XLA_FLAGS=count)
    elif gpu.count(os.environ) != devices:
        pytest.skip(f"needs {devices} GPUs")
    done = subprocess.run(
        [sys.executable, "-m", "tests.xla.context_parallel_steps"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_ring_order() -> None:
    """Device i has chunk i, and the chunk that is as far from the end."""
    assert fx.ring_order(12, 2).tolist() == [0, 1, 2, 9, 10, 11, 3, 4, 5, 6, 7, 8]
    with pytest.raises(ValueError, match="ring_order: tokens: got 10; accepted: a multiple of 4"):
        fx.ring_order(10, 2)


@pytest.mark.parametrize(("tokens", "keys"), [(5, 5), (4, 6)])
def test_tokens_that_do_not_go_together(tokens: int, keys: int) -> None:
    q, kv = np.zeros((tokens, 2, 8), np.float32), np.zeros((keys, 2, 8), np.float32)
    with pytest.raises(ValueError, match=f"ring_attention: q, k, v: got {tokens}, {keys} and {keys} tokens"):
        fx.ring_attention(q, kv, kv, np.array([0, 8], np.int32), 8, axis_name="context")
