"""Fixtures of the tests of NVIDIA GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from flashxla import native


@pytest.fixture
def library() -> native.Library:
    """The CUDA library; it needs no GPU to be looked at."""
    if not native.is_installed("cuda"):
        pytest.skip("libflashxla_cuda.so is not installed: make cuda")
    return native.library("cuda")


@pytest.fixture
def gpu(request: pytest.FixtureRequest, library: native.Library) -> None:
    """Only with --device cuda."""
    if request.config.option.device != "cuda":
        pytest.skip("needs a GPU: --device cuda")


@pytest.fixture
def torch(gpu: None) -> Any:
    """PyTorch with a GPU."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return torch


@pytest.fixture
def jax(gpu: None) -> Any:
    """JAX with a GPU."""
    jax = pytest.importorskip("jax")
    try:
        jax.devices("gpu")
    except RuntimeError as error:
        pytest.skip(str(error))
    return jax
