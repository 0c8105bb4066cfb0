"""libflashxla_cuda.so as a file, and what it does where there is no GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flashxla import native

OBJECTS = Path(__file__).parents[2] / "build" / "cuda"
# What every C++ library has.
OF_THE_ABI = {"_ZSt9terminatev", "_ZTISt9exception", "_ZTISt9bad_alloc"}
FUNCTIONS = ("kv_cache", "attention", "merge_states")

CALL_WITHOUT_GPU = """
import numpy as np
from flashxla import native
library = native.library("cuda")
out, lse = np.ones((4, 2, 64), np.float32), np.ones((2, 4), np.float32)
arrays = {"out_a": out, "lse_a": lse, "out_b": out, "lse_b": lse, "out": out.copy(), "lse": lse.copy()}
specs = {name: native.Spec("float32", array.shape) for name, array in arrays.items()}
args = library.arguments("merge_states", specs, {})
for name, array in arrays.items():
    getattr(args, name).data = array.ctypes.data
try:
    library.run("merge_states", args, stream=None)
except RuntimeError as error:
    print(error)
"""


def readelf(library: native.Library, *options: str) -> str:
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf")
    return subprocess.check_output(["readelf", "--wide", *options, library.path], text=True)


def test_it_needs_nothing_of_cuda_torch_or_python(library: native.Library) -> None:
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", readelf(library, "--dynamic"))
    system = re.compile(r"(lib(c|m|dl|rt|pthread)|ld-linux.*)\.so\.\d")
    assert needed and all(system.fullmatch(name) for name in needed), needed


def test_it_exports_the_c_abi_alone(library: native.Library) -> None:
    exported = set()
    for line in readelf(library, "--dyn-syms").splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[3:5] == ["FUNC", "GLOBAL"] and fields[6] != "UND":
            exported.add(fields[7].partition("@")[0])
    assert {f"flashxla_cuda_{name}" for name in FUNCTIONS} <= exported
    assert all(name.startswith("flashxla_") for name in exported), exported
    assert not any(name.startswith("flashxla_cpu_") for name in exported)


def test_kernels_need_no_c_plus_plus_library() -> None:
    """Wheels link them with another library than the one whose headers nvcc reads (wheels/build.py)."""
    objects = sorted(OBJECTS.rglob("*.cu.o"))
    if not objects or shutil.which("nm") is None:
        pytest.skip("needs nm, and the objects of make cuda")
    needed = {}
    for path in objects:
        symbols = subprocess.check_output(["nm", "--undefined-only", path], text=True)
        needed[path.name] = {
            name for name in symbols.split()[1::2] if re.match(r"_Z(T[ISV]|N|NK)?(St|S[abdios])", name)
        } - OF_THE_ABI
    assert not any(needed.values()), needed


def test_targets(library: native.Library) -> None:
    cpu = native.library("cpu")
    assert set(library.ffi_targets) == set(cpu.ffi_targets)
    assert library.ffi_api_version == cpu.ffi_api_version


def test_a_call_without_a_gpu_is_an_error(library: native.Library) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", CALL_WITHOUT_GPU], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("flashxla: merge_states: CUDA: "), done.stdout
