"""Fixtures: checkpoints and engines. JAX has two virtual CPU devices, or with JAX_PLATFORMS=cuda,cpu the GPUs; engines
run in this process.

tests/conftest.py is not read: the environment has none of what it needs (make test-vllm).
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

# Before JAX and vLLM are imported; the processes that tests start inherit it.
if "cuda" in os.environ.setdefault("JAX_PLATFORMS", "cpu"):
    os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = (
        "highest"  # not TF32: tokens are compared with those of float32
    )
os.environ.update(
    XLA_FLAGS="--xla_force_host_platform_device_count=2",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_XLA_CACHE_PATH=tempfile.mkdtemp(prefix="flashxla-vllm-compiled-"),
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)

import functools
import shutil

import pytest

from tests.vllm import checkpoints


def pytest_unconfigure() -> None:
    """Compiled programs are shared by the tests of one run."""
    shutil.rmtree(os.environ["VLLM_XLA_CACHE_PATH"], ignore_errors=True)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory):
    """The folder of a family's checkpoint, written on first use."""

    @functools.cache
    def folder(family: str) -> Path:
        path = tmp_path_factory.mktemp(family)
        checkpoints.save(checkpoints.FAMILIES[family], path)
        return path

    return folder


@pytest.fixture(scope="session")
def hf_tokens(checkpoint):
    """Hugging Face's greedy tokens for a family and prompts."""

    @functools.cache
    def tokens(family: str, prompts: tuple[tuple[int, ...], ...], count: int) -> list[list[int]]:
        return checkpoints.greedy_tokens(checkpoint(family), [list(prompt) for prompt in prompts], count)

    def with_lists(
        family: str, prompts: list[list[int]] = checkpoints.PROMPTS, count: int = checkpoints.NEW_TOKENS
    ) -> list[list[int]]:
        return tokens(family, tuple(map(tuple, prompts)), count)

    return with_lists
