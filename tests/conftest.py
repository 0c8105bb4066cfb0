"""Options and fixtures of every test: which front ends, which device, and the session's random seed."""

from __future__ import annotations

import functools
import importlib.util
import os
import secrets

# The workers share the cores: a product of NumPy's on all of them waits for the others.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Where TorchTPU is installed, `import torch` would start it, without a plugin.
if importlib.util.find_spec("torch_tpu"):
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

import zlib
from typing import Any

import hypothesis
import numpy as np
import pytest

from tests.frontends import FRONTENDS, OF_OTHER_ENVIRONMENTS, Frontend, LazyFrontend, Unavailable

# torch.compile's default backend takes seconds a call: only tests that name it run it.
DEFAULT_FRONTENDS = tuple(name for name in FRONTENDS if name != "inductor")
# torchax_jit's gradients are JAX's (tests/torchax).
WITH_AUTOGRAD = pytest.mark.frontends(*(name for name in DEFAULT_FRONTENDS if name != "torchax_jit"))
_OF_THIS_ENVIRONMENT = [name for name in FRONTENDS if name not in OF_OTHER_ENVIRONMENTS]

hypothesis.settings.register_profile(
    "flashxla", deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
)
hypothesis.settings.load_profile("flashxla")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--frontends", default=",".join(_OF_THIS_ENVIRONMENT), help="comma-separated front ends to run"
    )
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="where the tensors live")
    parser.addoption("--seed", type=int, default=None, help="of the random inputs; drawn when not given")
    parser.addoption(
        "--random-seconds",
        type=float,
        default=None,
        help="of random calls; 20 on a CPU, 120 on a GPU; a test of more than 900 needs -o timeout=0",
    )
    parser.addoption("--random-only", type=int, default=None, metavar="NUMBER", help="this random call alone")
    parser.addoption("--one-in", type=int, default=1, metavar="N", help="run a random one of N tests")
    parser.addoption(
        "--one-in-on-other-devices",
        type=int,
        default=4,
        metavar="N",
        help="of the tests that go through the cases of a GPU's engine, on a CPU",
    )
    parser.addoption(
        "--one-in-on-other-isas",
        type=int,
        default=6,
        metavar="N",
        help="of the conformance tests on each instruction set but the best",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "frontends(*names): the front ends that a test runs through")
    config.addinivalue_line("markers", "gpu_engine: cases that differ for an engine of GPUs alone")
    unknown = set(_selected(config)) - set(FRONTENDS)
    if unknown:
        raise pytest.UsageError(f"--frontends: {sorted(unknown)} not in {list(FRONTENDS)}")
    if config.option.seed is None:
        worker = getattr(config, "workerinput", None)
        config.option.seed = worker["seed"] if worker else secrets.randbits(32)
    if config.option.random_seconds is None:
        config.option.random_seconds = 20 if config.option.device == "cpu" else 120
    if config.option.device == "cpu":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        os.environ.setdefault("PJRT_DEVICE", "CPU")
    else:
        # Workers of pytest-xdist and the processes that tests start share the GPU.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.08")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Workers of pytest-xdist have the seed that the header shows."""
    node.workerinput["seed"] = node.config.option.seed


def pytest_report_header(config: pytest.Config) -> str:
    return f"flashxla: --device {config.option.device} --seed {config.option.seed}"


def _selected(config: pytest.Config) -> list[str]:
    return config.option.frontends.split(",")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "frontend" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("frontends")
        metafunc.parametrize("frontend", marker.args if marker else DEFAULT_FRONTENDS, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    others = {item for item in items if _frontend_of(item) not in (None, *_selected(config))}
    config.hook.pytest_deselected(items=list(others))
    items[:] = [item for item in items if item not in others]
    of_gpus = 1 if config.option.device == "cuda" else config.option.one_in_on_other_devices
    draws = np.random.default_rng(config.option.seed).random(len(items))
    kept = {
        item
        for item, draw in zip(items, draws, strict=True)
        if draw * config.option.one_in * (of_gpus if item.get_closest_marker("gpu_engine") else 1) < 1
    }
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
    for item in items:
        function = getattr(item, "function", None)
        if getattr(function, "is_hypothesis_test", False):
            hypothesis.seed(config.option.seed)(function)


def _frontend_of(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("frontend") if callspec else None


@functools.cache
def _frontend(name: str, device: str) -> Frontend | Unavailable:
    try:
        return FRONTENDS[name](device)
    except Unavailable as error:
        return error


@pytest.fixture(scope="session", autouse=True)
def xla_comes_first(request: pytest.FixtureRequest) -> None:
    """PyTorch's autograd knows the devices of its first backward, so XLA's must be there by then."""
    if {"lazy", "openxla"} & set(_selected(request.config)):
        lazy = _frontend("lazy", request.config.option.device)
        if isinstance(lazy, LazyFrontend):
            lazy.target_device()


@pytest.fixture
def frontend(request: pytest.FixtureRequest) -> Frontend:
    """The front end under test."""
    frontend = _frontend(request.param, request.config.option.device)
    if isinstance(frontend, Unavailable):
        pytest.skip(str(frontend))
    return frontend


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that only --seed and the test's name decide."""
    return np.random.default_rng([request.config.option.seed, zlib.crc32(request.node.nodeid.encode())])
