"""docs/adding-an-operation.md, word for word: what it shows is built, and called through every front end."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.native.test_sanitizers import ROOT

# The headers of the build requirement: with newer ones torch_xla would refuse the handlers. `make test` fetches them.
HEADERS = ROOT / "build" / "jaxlib" / "jaxlib" / "include"
PAGE = ROOT / "docs" / "adding-an-operation.md"
FRONTENDS = ("torch", "inductor", "lazy", "openxla", "jax", "jax_jit")
# A step of the page: what is done to which file, and the block that follows.
STEP = re.compile(r"^(New file|Change in) `([^`]+)`[^\n]*\n\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Step(NamedTuple):
    kind: str
    path: str
    language: str
    text: str


def steps() -> list[Step]:
    return [Step(*match.groups()) for match in STEP.finditer(PAGE.read_text())]


def apply(tree: Path, step: Step) -> None:
    """Do what a step says in a copy of the sources."""
    path = tree / step.path
    if step.kind == "New file":
        assert not path.exists(), f"{step.path} is there already"
        path.write_text(step.text)
        return
    text = path.read_text()
    for hunk in re.split(r"^@@\n", step.text, flags=re.MULTILINE)[1:]:
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        assert text.count(old) == 1, f"{step.path} does not have, once:\n{old}"
        text = text.replace(old, new)
    path.write_text(text)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources with the page's changes."""
    tree = tmp_path_factory.mktemp("flashxla")
    for folder in ("csrc", "cmake", "src"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "CMakeLists.txt", tree)
    for step in steps():
        apply(tree, step)
    return tree


@pytest.fixture(scope="module")
def libraries(tree: Path) -> Path:
    """The folder of its CPU library, built in a hurry."""
    if not all(map(shutil.which, ("cmake", "g++"))):
        pytest.skip("needs cmake and g++")
    if not HEADERS.exists():
        pytest.skip("needs build/jaxlib: make build/jaxlib")
    build = tree / "build"
    options = {
        "CMAKE_BUILD_TYPE": "Debug",
        "CMAKE_CXX_FLAGS": "-O0 -g0",
        "FLASHXLA_XLA_INCLUDE_DIR": HEADERS,
    }
    run("cmake", "-S", tree, "-B", build, *(f"-D{name}={value}" for name, value in options.items()))
    run("cmake", "--build", build, "--target", "flashxla_cpu", "-j", "2")
    return build


def run(*command: object, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def test_no_front_end_is_touched() -> None:
    touched = {step.path for step in steps()}
    assert {path.split("/")[0] for path in touched} == {"csrc", "src"}
    assert all(path.startswith("src/flashxla/ops/") for path in touched if path.startswith("src/"))
    assert not any(path.startswith("csrc/ffi/") for path in touched)


@pytest.mark.parametrize("name", FRONTENDS)
def test_front_end(tree: Path, libraries: Path, name: str) -> None:
    pytest.importorskip({"jax": "jax", "jax_jit": "jax", "lazy": "torch_xla"}.get(name, "torch"))
    out = run(
        sys.executable,
        "-m",
        "tests.docs.scale_heads",
        tree / "src",
        name,
        FLASHXLA_LIBRARY_DIR=str(libraries),
        JAX_PLATFORMS="cpu",
        PJRT_DEVICE="CPU",
    )
    assert out.splitlines()[-1] == f"{name}: right"


def test_the_example_prints_what_it_says(tree: Path, libraries: Path) -> None:
    pytest.importorskip("torch")
    (code,) = re.findall(r"^```python\n(import torch, .*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (expected,) = re.findall(r"^# (\[.*)$", code, re.MULTILINE)
    script = "import sys; from tests.docs.scale_heads import use\nuse(sys.argv[1])\n" + code
    got = run(sys.executable, "-c", script, tree / "src", FLASHXLA_LIBRARY_DIR=str(libraries))
    assert got.strip() == expected


def test_types(tree: Path) -> None:
    """What the page shows is typed as the rest is."""
    pytest.importorskip("mypy")
    run(
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        ROOT / "pyproject.toml",
        tree / "src" / "flashxla" / "ops",
    )


def test_cuda_kernels_compile(tree: Path) -> None:
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    (source,) = (step.path for step in steps() if step.language == "cuda")
    includes = [f"-I{tree / 'csrc'}", f"-I{tree / 'csrc' / 'include'}"]
    flags = ["-std=c++17", "-arch=sm_90a", "-Werror", "all-warnings"]
    run(nvcc, *flags, *includes, "-c", tree / source, "-o", tree / "scale_heads.o")
