"""Fixtures: checkpoints, and what Hugging Face writes from them."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.vllm import checkpoints


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
