"""Tests what `make wheel` built: python wheels/test.py (--require 3.11,3.12,...).

- auditwheel: each wheel needs no more than its platform tag says.
- The sdist, from which `make wheel` builds the wheels, holds nothing that they do not need.
- In an empty environment of each Python that can be had, the x86_64 wheel and JAX, and nothing else: wheels/smoke.py.
- The wheel for NVIDIA GPUs, if it is there: flashxla finds its library and can say what a call would need.
- wheels/smoke.cc: the libraries without Python; the one for aarch64 under qemu-aarch64, if that is installed
  (Debian: qemu-user and libc6-arm64-cross).
"""

from __future__ import annotations

import argparse
import glob
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import zig

from build import BUILD, DIST, ROOT, TOOLS

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
ARM_LIBC = Path(os.environ.get("ARM_LIBC", "/usr/aarch64-linux-gnu"))
IN_AN_SDIST = (
    "CHANGELOG.md",
    "CMakeLists.txt",
    "LICENSE",
    "PKG-INFO",
    "README.md",
    "cmake/",
    "csrc/",
    "pyproject.toml",
    "src/",
)
FIND_CUDA = """
import numpy as np, flashxla
from flashxla import native
lib = native.library("cuda")
cache, i = np.zeros((16, 16, 2, 128), np.float16), lambda *shape: np.zeros(shape, np.int32)
q = np.zeros((8, 8, 128), np.float16)
needs = flashxla.explain("paged_attention", q, (cache, cache), i(8), i(8, 4), i(9), i(1), 0.1, platform="cuda")
assert "split" in str(needs), needs
print(f"{lib.path.parent.parent.name}: found and loaded")
"""
SKIPPED: list[str] = []


def main() -> int:
    """Run all tests. Exit status 1 if a Python that is required could not be had."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--require", default="", help="Pythons that must be tested, separated by commas")
    args = parser.parse_args()
    required = set(filter(None, args.require.split(",")))

    wheels = {processor: find(f"flashxla-*{zig.platform(processor)}.whl") for processor in zig.PROCESSORS}
    for wheel in (*wheels.values(), *DIST.glob("flashxla_cuda*.whl")):
        audit(wheel)
    for processor, wheel in wheels.items():
        run_without_python(processor, wheel)
    tested = [version for version in PYTHONS if install(version, wheels["x86_64"])]
    for wheel in DIST.glob("flashxla_cuda*.whl"):
        install_cuda(tested[-1], wheel)
    look_into(find("flashxla-*.tar.gz"))
    for line in SKIPPED:
        print(f"NOT TESTED: {line}")
    if missing := required - set(tested):
        print(f"flashxla: required, but not tested: Python {', '.join(sorted(missing))}", file=sys.stderr)
    return int(bool(missing) or not tested)


def find(pattern: str) -> Path:
    """The one file of dist that a pattern names."""
    files = list(DIST.glob(pattern))
    if len(files) != 1:
        raise SystemExit(f"flashxla: one {pattern} was expected in dist, found {len(files)}: run make wheel")
    return files[0]


def audit(wheel: Path) -> None:
    """Hold a wheel's libraries against the platform tag in its name."""
    tag = wheel.stem.rpartition("-")[2].rpartition(".")[2]
    text = " ".join(run(TOOLS / "auditwheel", "show", wheel).split())
    assert f'consistent with the following platform tag: "{tag}"' in text, text
    print(f"auditwheel: {wheel.name}")


def run_without_python(processor: str, wheel: Path) -> None:
    """Run wheels/smoke.cc with the library of a wheel."""
    if processor == os.uname().machine:
        emulator: list[str | Path] = []
    else:
        qemu = shutil.which(f"qemu-{processor}") or shutil.which(f"qemu-{processor}-static")
        if qemu is None or not ARM_LIBC.exists():
            SKIPPED.append(
                f"the library for {processor} is only compiled: no qemu-{processor}, or no {ARM_LIBC}"
            )
            return
        emulator = [qemu, "-L", ARM_LIBC]
    folder = BUILD / f"smoke-{processor}"
    with zipfile.ZipFile(wheel) as archive:
        library = archive.extract("flashxla/lib/libflashxla_cpu.so", folder)
    program = folder / "smoke"
    include = ROOT / "csrc" / "include"
    compiler = zig.command(processor).split()
    run(*compiler, "-O1", "-std=c++17", f"-I{include}", ROOT / "wheels" / "smoke.cc", "-o", program, "-ldl")
    print(f"{processor}, without Python: {run(*emulator, program, library)}")


def install(version: str, wheel: Path) -> bool:
    """Run wheels/smoke.py where the wheel is installed. Returns whether there is such a Python."""
    environment = BUILD / f"python-{version}"
    shutil.rmtree(environment, ignore_errors=True)
    # uv takes an interpreter that it finds, or downloads one. pyenv's are found by their folders.
    pyenv = glob.glob(
        f"{os.environ.get('PYENV_ROOT', Path.home() / '.pyenv')}/versions/{version}.*/bin/python"
    )
    made = subprocess.run(
        [TOOLS / "uv", "venv", "-q", "--python", *(pyenv[:1] or [version]), environment],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        SKIPPED.append(f"Python {version}: not found here, and it could not be downloaded")
        return False
    # The versions that the other tests run with, so that a new JAX does not break this one.
    python = environment / "bin" / "python"
    constraints = ["--constraint", str(ROOT / "requirements.lock")]
    run(
        TOOLS / "uv",
        "pip",
        "install",
        "-q",
        "--python",
        python,
        *constraints,
        "--only-binary",
        ":all:",
        wheel,
    )
    print(run(python, "-I", ROOT / "wheels" / "smoke.py"))
    run(environment / "bin" / "flashxla", "--help")
    return True


def install_cuda(version: str, wheel: Path) -> None:
    """Install a wheel of the library for GPUs beside flashxla, and let flashxla load it. No GPU is needed."""
    python = BUILD / f"python-{version}" / "bin" / "python"
    run(TOOLS / "uv", "pip", "install", "-q", "--python", python, "--no-deps", wheel)
    print(run(python, "-I", "-c", FIND_CUDA))
    run(TOOLS / "uv", "pip", "uninstall", "-q", "--python", python, wheel.name.partition("-")[0])


def look_into(sdist: Path) -> None:
    """Hold the files of the sdist against what belongs there."""
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    extra = [name for name in names if not name.startswith(IN_AN_SDIST)]
    assert not extra, extra
    print(f"{sdist.name}: {len(names)} files")


def run(*command: str | Path) -> str:
    """Run a command, and return what it prints. If it fails, that is shown."""
    environment = {**os.environ, "PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        env=environment,
        cwd=BUILD,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}{done.stderr}\nflashxla: failed: {' '.join(map(str, command))}")
    return done.stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())
