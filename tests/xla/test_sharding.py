"""jit divides calls over devices by the shardings of their arguments: no gather, no copy of a cache; or a warning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


CACHED = """
import sys
import jax
import numpy as np
from jax._src import monitoring
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import flashxla.jax as fx

jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
mesh = jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Auto,))
lens = np.array([0, 6], np.int32)
q = jax.device_put(np.ones((6, 4, 8), np.float32), NamedSharding(mesh, PartitionSpec(None, "heads")))
events = []
monitoring.register_event_listener(lambda event, **_: events.append(event.rpartition("/")[2]))
for scale in map(float, sys.argv[2:]):
    events.clear()
    jax.jit(lambda q: fx.flash_attn_varlen_func(q, q, q, 6, lens, 6, lens, softmax_scale=scale))(q)
    print(scale, "hit" if "cache_hits" in events else "miss")
"""


def test_cache_key(tmp_path: Path) -> None:
    """Without the address in its key a program is found by another process, and is taken for no other one."""
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}

    def ran(*scales: str) -> list[str]:
        command = [sys.executable, "-c", CACHED, str(tmp_path), *scales]
        done = subprocess.run(
            command, env={**os.environ, **flags}, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.splitlines()

    assert ran("0.5") == ["0.5 miss"]
    assert ran("0.5", "0.25") == ["0.5 hit", "0.25 miss"]
