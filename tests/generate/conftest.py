"""Skips the folder where its dependencies are missing, and keeps what tests leave in PyTorch from the next."""

from __future__ import annotations

import sys
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


@pytest.fixture(autouse=True)
def no_compiled_code() -> Iterator[None]:
    yield
    # torch.compile refuses to compile one function for the many models of one process.
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
