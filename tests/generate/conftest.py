"""Skips the folder where its dependencies are missing, and keeps PyTorch to one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("rich")

import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    # The models are tiny: with more threads their time goes into waking threads.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
