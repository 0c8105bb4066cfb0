"""The stub plugin and the adapter, in fresh copies for each test."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from flashxla import native
from tests.pjrt import caller

ROOT = Path(__file__).parents[2]
STUB, ADAPTER = "stub_plugin.so", "libflashxla_pjrt.so"
LIBRARIES = "FLASHXLA_TEST_PJRT"  # a folder with both, to be tested in place of those that are


def build(library: Path, sources: Iterable[Path], *flags: str) -> Path:
    """Compile a library. Skips the test where there is no compiler."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    flags = ("-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", *flags)
    includes = (f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc/include'}")
    command = [compiler, *flags, *includes, *map(str, sources), "-o", str(library), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library


def build_stub(folder: Path, *flags: str) -> Path:
    return build(folder / STUB, [ROOT / "tests/pjrt/stub_plugin.cc"], *flags)


def build_adapter(folder: Path, *flags: str) -> Path:
    return build(folder / ADAPTER, sorted((ROOT / "csrc/pjrt").glob("*.cc")), *flags)


@pytest.fixture(scope="session")
def stub_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if folder := os.environ.get(LIBRARIES):
        return Path(folder) / STUB
    return build_stub(tmp_path_factory.mktemp("stub"))


@pytest.fixture(scope="session")
def adapter_library() -> Path:
    """The installed one, unless told otherwise."""
    if folder := os.environ.get(LIBRARIES):
        return Path(folder) / ADAPTER
    return native.library_path("pjrt")


@pytest.fixture
def stub(stub_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> caller.Stub:
    """A plugin of version 0.117 that has everything; the test may set STUB_* before it is loaded."""
    for name in ("VERSION", "TABLE", "FFI", "FAIL"):
        monkeypatch.delenv(f"STUB_{name}", raising=False)
    return caller.Stub(stub_library, tmp_path / "plugin.so")


@pytest.fixture
def fresh(adapter_library: Path, tmp_path: Path) -> caller.FreshAdapter:
    """An adapter that has loaded nothing yet."""
    return caller.FreshAdapter(adapter_library, tmp_path / "adapter.so")
