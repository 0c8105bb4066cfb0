"""Fixtures: checkpoints and engines. JAX has two virtual CPU devices, or with JAX_PLATFORMS=cuda,cpu the GPUs; engines
run in this process.

tests/conftest.py is not read: the environment has none of what it needs (make test-vllm).
"""

from __future__ import annotations

import os
import tempfile

# Before JAX and vLLM are imported; the processes that tests start inherit it.
if "cuda" in os.environ.setdefault("JAX_PLATFORMS", "cpu"):
    # Not TF32: tokens are compared with those of float32.
    os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
    os.environ["XLA_FLAGS"] = ""
else:
    # LLVM's passes take longer than tiny models run. XLA's own, which decide what is copied, stay.
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 "
os.environ["XLA_FLAGS"] += "--xla_force_host_platform_device_count=2"
if "PYTEST_XDIST_WORKER" not in os.environ:  # a worker of pytest-xdist has its parent's
    os.environ["VLLM_XLA_CACHE_PATH"] = tempfile.mkdtemp(prefix="flashxla-vllm-compiled-")
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.fixtures import checkpoint, hf_tokens  # noqa: F401


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of a file that shares an engine or a server go to one worker, all others to the one that is free."""
    from xdist.scheduler import LoadScopeScheduling

    @functools.cache
    def shares(file: str) -> bool:
        return 'scope="module"' in Path(config.rootpath, file).read_text()

    class ByEngine(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if shares(file) else nodeid

    return ByEngine(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The minute of test_soak comes first, lest one worker run it when the other has nothing left."""
    items.sort(key=lambda item: item.path.stem != "test_soak")


def pytest_unconfigure() -> None:
    """Compiled programs are shared by the tests of one run."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ["VLLM_XLA_CACHE_PATH"], ignore_errors=True)
