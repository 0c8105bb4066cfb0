"""jax.distributed: a program over the devices of two processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.ports import free_port


def test_heads_over_two_processes(request: pytest.FixtureRequest) -> None:
    """On two CPUs, whose collectives go through Gloo: the reference's numbers, and no gather."""
    if request.config.option.device != "cpu":
        pytest.skip("runs on CPUs")
    address = f"localhost:{free_port()}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.xla.processes_steps", address, str(number)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0, output[-3000:]
    finally:
        for process in processes:
            process.kill()
