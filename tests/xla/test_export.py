"""A program that one process exports runs in another that has not traced any operation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")
pytest.importorskip("flatbuffers")

EXPORT = """
import sys
import jax
import jax.numpy as jnp
import flashxla.jax as fx

def step(key, cache, slots):
    return fx.reshape_and_cache(key, key, cache, slots, "interleaved")

shapes = [((2, 1, 4), "float32"), ((3, 2, 2, 4), "float32"), ((2,), "int32")]
arguments = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
exported = jax.export.export(jax.jit(step), disabled_checks=fx.export_checks())(*arguments)
open(sys.argv[1], "wb").write(exported.serialize())
"""

LOAD = """
import sys
import flashxla
assert "jax" not in sys.modules
flashxla.setup_custom_call()

import jax
import jax.numpy as jnp
import numpy as np

step = jax.jit(jax.export.deserialize(open(sys.argv[1], "rb").read()).call, donate_argnums=1)
cache = jnp.zeros((3, 2, 2, 4))
pointer = cache.unsafe_buffer_pointer()
cache = step(jnp.ones((2, 1, 4)), cache, jnp.array([0, 5], jnp.int32))
assert cache.unsafe_buffer_pointer() == pointer
written = np.asarray(cache).reshape(6, 8).any(axis=1)
assert written.tolist() == [True, False, False, False, False, True], written
"""


def test_an_exported_program_runs_in_another_process(tmp_path: Path) -> None:
    for code in (EXPORT, LOAD):
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "step")], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
