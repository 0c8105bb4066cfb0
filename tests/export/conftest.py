"""An exported model and the C++ program that runs it."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from flashxla import native
from flashxla.cli import main

EXAMPLE = Path(__file__).parents[2] / "examples/run_without_python"

# torch_xla 2.9 brings a torchax that does not import.
if any(importlib.util.find_spec(package) is None for package in ("torch_tpu", "torchax")):
    collect_ignore_glob = ["test_*.py"]

Export = Callable[..., Path]


@dataclasses.dataclass(frozen=True)
class Program:
    """The C++ program, with what it needs to run the default model on a CPU."""

    path: Path
    options: dict[str, str]

    def run(self, *more: str, **changed: str) -> subprocess.CompletedProcess[str]:
        """Run it with options changed."""
        options = [text for name, value in (self.options | changed).items() for text in (f"--{name}", value)]
        # No Python of any environment can be found from it.
        environment = {
            "PATH": "/nonexistent",
            **{k: v for k, v in os.environ.items() if k.startswith("STUB_")},
        }
        if "XLA_FLAGS" in os.environ:
            environment["XLA_FLAGS"] = os.environ["XLA_FLAGS"]
        return subprocess.run(
            [str(self.path), *options, *more], capture_output=True, text=True, env=environment, timeout=120
        )


@pytest.fixture(scope="session")
def export(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Runs `flashxla export`; returns the folder."""

    def run(*options: str) -> Path:
        folder = tmp_path_factory.mktemp("exported")
        assert main(["export", "--output", str(folder), *options]) == 0
        return folder

    return run


@pytest.fixture(scope="session")
def default_model(export: Export) -> Path:
    return export()


@pytest.fixture(scope="session")
def program(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Built as docs/without-python.md says."""
    from flashxla.xla.cpu import find_plugin

    build = tmp_path_factory.mktemp("build")
    for command in (["-S", str(EXAMPLE), "-B", str(build)], ["--build", str(build), "--parallel", "2"]):
        done = subprocess.run(["cmake", *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "warning" not in done.stdout + done.stderr
    options = {
        "program": str(default_model),
        "plugin": str(find_plugin()),
        "library": str(native.library_path("cpu")),
    }
    return Program(build / "run_without_python", options)
