"""What the tests of the operations share."""

from __future__ import annotations

import contextlib

import pytest

from tests.frontends import LazyFrontend, Unavailable


@pytest.fixture(scope="session", autouse=True)
def xla_comes_first(request: pytest.FixtureRequest) -> None:
    """PyTorch's autograd knows the devices of its first backward, so XLA's must be there by then."""
    if {"lazy", "openxla"} & set(request.config.option.frontends.split(",")):
        with contextlib.suppress(Unavailable):
            LazyFrontend(request.config.option.device).target_device()
