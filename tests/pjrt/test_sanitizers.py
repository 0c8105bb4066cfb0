"""The tests of the adapter's library, with that and the stub built with address and undefined-behaviour sanitizers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native.test_sanitizers import runtime
from tests.pjrt.conftest import LIBRARIES, ROOT, build_adapter, build_stub

FLAGS = ("-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-g1")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the sanitizers' libraries are preloaded as on Linux"
)

# A caller whose struct is shorter than it says.
OVERRUN = """
import ctypes, sys
from pathlib import Path
from tests.pjrt import caller

folder, temporary = map(Path, sys.argv[1:])
stub = caller.Stub(folder / "stub_plugin.so", temporary / "plugin.so")
fresh = caller.FreshAdapter(folder / "libflashxla_pjrt.so", temporary / "adapter.so")
fresh.load(stub.path)
memory = caller.Memory(caller.DeserializeAndLoad)
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
shorter = libc.malloc(memory.size - 8)
ctypes.memmove(shorter, memory.address, memory.size - 8)
fresh.table().call_at("Executable_DeserializeAndLoad", shorter)
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both."""
    folder = tmp_path_factory.mktemp("sanitizers")
    build_stub(folder, *FLAGS)
    build_adapter(folder, *FLAGS)
    return folder


def run_python(libraries: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        LIBRARIES: str(libraries),
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libubsan.so')}",
        # CPython leaks what it allocates once; a warning of UBSan is a failure.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1:exitcode=99",
        "PYTHONMALLOC": "malloc",  # every struct of the caller is an allocation of its own, which is guarded
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": "",
    }
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_adapter(libraries: Path, tmp_path: Path) -> None:
    # Without the conftest.py of all tests, whose imports take seconds here; the output is not captured, since a
    # sanitizer ends the process.
    plugins = ("--noconftest", "-p", "tests.pjrt.conftest", "-p", "no:cacheprovider")
    names = ("test_plugin_adapter.py", "test_torch_tpu.py", "test_exported_tensors.py")
    tests = [ROOT / "tests/pjrt" / name for name in names]
    done = run_python(libraries, "-m", "pytest", "-s", *plugins, f"--basetemp={tmp_path / 'inner'}", *tests)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert " passed" in done.stdout


def test_the_harness_can_fail(libraries: Path, tmp_path: Path) -> None:
    done = run_python(libraries, "-c", OVERRUN, libraries, tmp_path)
    assert done.returncode == 99, done.stdout + done.stderr
    assert "heap-buffer-overflow" in done.stderr
    assert "WithGrown" in done.stderr  # in the adapter
