"""Random valid and hostile calls of the C ABI, in a build with address and undefined-behaviour sanitizers."""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CALLS = 2000

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the sanitizers' libraries are preloaded as on Linux"),
    pytest.mark.skipif(not all(map(shutil.which, ("cmake", "g++"))), reason="needs cmake and g++"),
]


def xla_headers() -> Path:
    """jaxlib's: the handlers are built with them but not called here, so that any version does."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or spec.origin is None:
        pytest.skip("needs the XLA headers that jaxlib brings")
    return Path(spec.origin).parent / "include"


@functools.cache
def runtime(name: str) -> str:
    """The path of a library of g++."""
    return subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CPU library, built once a session, for all workers of pytest-xdist."""
    temporary = tmp_path_factory.getbasetemp()
    shared = temporary.parent if "PYTEST_XDIST_WORKER" in os.environ else temporary
    build = shared / "sanitizers"
    with (shared / "sanitizers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (build / "libflashxla_cpu.so").exists():
            build_with_sanitizers(build)
    return build / "libflashxla_cpu.so"


def build_with_sanitizers(build: Path) -> None:
    options = {
        "FLASHXLA_SANITIZE": "address,undefined",
        "FLASHXLA_XLA_INCLUDE_DIR": xla_headers(),
        "CMAKE_CXX_COMPILER": shutil.which("g++"),
    }
    configure = ["cmake", "-S", ROOT, "-B", build, *(f"-D{name}={value}" for name, value in options.items())]
    for command in (configure, ["cmake", "--build", build, "--target", "flashxla_cpu", "-j", "2"]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def drive(library: Path, *arguments: object, check: str = "0") -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libubsan.so')}",
        # CPython leaks what it allocates once; a warning of UBSan is a failure.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1:exitcode=99",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "FLASHXLA_CHECK": check,
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.native.driver", library, *arguments]
    return subprocess.run(
        [str(part) for part in command],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize("check", ["0", "1"], ids=["skipping", "FLASHXLA_CHECK"])
def test_random_calls(library: Path, request: pytest.FixtureRequest, check: str) -> None:
    done = drive(library, request.config.option.seed, CALLS, check=check)
    assert done.returncode == 0, done.stdout[-200:] + done.stderr
    assert done.stdout.count("call ") == CALLS


def test_the_harness_can_fail(library: Path) -> None:
    """A write one block behind a cache is reported, and ends the process."""
    done = drive(library, 0, 0, "overrun")
    assert done.returncode == 99, done.stdout + done.stderr
    assert "heap-buffer-overflow" in done.stderr
    assert "WRITE of size" in done.stderr
    assert "kv_cache" in done.stderr  # in the kernel, not in the driver
