"""Attention over keys that are spread over devices: ring attention, and decoding with merged results."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import ml_dtypes
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


ERRORS = [
    ({"q": np.zeros((4, 2, 8), np.int32)}, TypeError, "q: got dtype int32"),
    ({"q": np.zeros((4, 8), np.float32)}, ValueError, r"q: got shape \[4, 8\]"),
    ({"q": np.zeros((4, 3, 8), np.float32)}, ValueError, "q: got 3 heads"),
    ({"cu_seqlens": np.zeros(2, np.float32)}, TypeError, "cu_seqlens: got dtype float32"),
    ({"max_seqlen": -1}, ValueError, "max_seqlen: got -1"),
    ({"window_size": (-3, 0)}, ValueError, "window_size: got -3"),
    ({"softmax_scale": "x"}, TypeError, "softmax_scale: got 'x'"),
    (
        {name: np.zeros((4, 2, 8), ml_dtypes.float8_e4m3fn) for name in "qkv"},
        TypeError,
        "q: got dtype float8",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), ERRORS, ids=lambda x: str(x)[:25])
def test_errors(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {name: np.zeros((4, 2, 8), np.float32) for name in "qkv"}
    arguments |= {"cu_seqlens": np.array([0, 8], np.int32), "max_seqlen": 8, "axis_name": "context"}
    with pytest.raises(error, match=f"^ring_attention: {message}"):
        fx.ring_attention(**arguments | changes)
