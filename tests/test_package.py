"""The package where only some of the frameworks are installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHOUT = "import sys\nfor name in {names!r}: sys.modules[name] = None\n"

PLAIN_TORCH = """
import torch, flashxla.torch as fx
cache = torch.zeros(2, 4, 1, 8)
fx.reshape_and_cache_flash(torch.ones(1, 1, 8), torch.ones(1, 1, 8), cache, cache.clone(), torch.tensor([5]))
assert cache[1, 1].sum() == 8 and cache.sum() == 8
"""
JAX_ALONE = """
import jax.numpy as jnp, flashxla.jax as fx
x = jnp.ones((1, 1, 8))
k, v = fx.reshape_and_cache_flash(x, x, jnp.zeros((2, 4, 1, 8)), jnp.zeros((2, 4, 1, 8)), jnp.array([5]))
assert k[1, 1].sum() == 8 and k.sum() == 8
"""


def run(code: str, without: tuple[str, ...]) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", WITHOUT.format(names=without) + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("code", "needs", "without"),
    [
        (PLAIN_TORCH, "torch", ("jax", "jaxlib", "torch_xla")),
        (JAX_ALONE, "jax", ("torch", "torch_xla")),
    ],
    ids=["torch", "jax"],
)
def test_works_alone(code: str, needs: str, without: tuple[str, ...]) -> None:
    pytest.importorskip(needs)
    done = run(code, without)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("module", "without", "message"),
    [
        ("flashxla.torch", "torch", "pip install '.[torch]' in a checkout"),
        ("flashxla.jax", "jax", "flashxla.jax needs JAX"),
    ],
)
def test_a_missing_framework_is_named(module: str, without: str, message: str) -> None:
    done = run(f"import {module}", (without,))
    assert "ImportError" in done.stderr and message in done.stderr
