"""Fixtures of tests with models that are tiny."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    # With more threads the models' time goes into waking threads.
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
