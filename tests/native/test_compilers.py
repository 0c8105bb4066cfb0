"""Compilers that the CPU library is built with, and one that CMake refuses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native.test_sanitizers import ROOT, xla_headers

pytestmark = pytest.mark.skipif(not all(map(shutil.which, ("cmake", "g++"))), reason="needs cmake and g++")
# The oldest of each, where a machine has them.
OTHERS = ("g++-11", "clang++-14")


def configure(build: Path, compiler: str) -> subprocess.CompletedProcess[str]:
    options = {"CMAKE_CXX_COMPILER": compiler, "FLASHXLA_XLA_INCLUDE_DIR": xla_headers()}
    command = ["cmake", "-S", ROOT, "-B", build, *(f"-D{name}={value}" for name, value in options.items())]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True)


@pytest.mark.parametrize("compiler", OTHERS)
def test_older_compilers(compiler: str, tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    done = configure(tmp_path, compiler)
    assert done.returncode == 0, done.stderr
    command = ["cmake", "--build", str(tmp_path), "--target", "flashxla_cpu", "-j", "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning:" not in done.stderr, done.stderr
    pytest.importorskip("torch")
    tests = [str(ROOT / "tests" / "ops" / "test_flash_attn_varlen.py"), "-k", "test_case or test_random_case"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--frontends", "torch", *tests],
        env={**os.environ, "FLASHXLA_LIBRARY_DIR": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_a_compiler_that_is_too_old_is_named(tmp_path: Path) -> None:
    """One that says it is GCC 10."""
    old = tmp_path / "g++-10"
    old.write_text('#!/bin/sh\nexec g++ -U__GNUC__ -D__GNUC__=10 "$@"\n')
    old.chmod(0o755)
    done = configure(tmp_path / "build", str(old))
    assert done.returncode != 0
    message = " ".join(done.stderr.split())
    assert "the C++ compiler is GNU 10" in message
    assert "accepted: GCC 11 or newer, Clang 14 or newer" in message
