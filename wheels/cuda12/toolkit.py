"""Puts a toolkit of CUDA 12 together in build/cuda12, without root: python wheels/cuda12/toolkit.py.

NVIDIA's packages on PyPI have all of CUDA 13's compiler, but of CUDA 12's only parts: nvcc, cudafe++, cicc and
fatbinary are missing. Debian has them in a package, whose headers and libraries would be a download of 1 GB. So the
compiler is Debian's, fetched by apt from the mirror that this machine uses, and the rest is PyPI's.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOOLKIT = HERE.parents[1] / "build" / "cuda12"
PARTS = TOOLKIT.with_name("cuda12-parts")
UV = Path(sys.executable).with_name("uv")

SUITE = "trixie non-free"
COMPILER = "nvidia-cuda-toolkit=12.4.131~12.4.1-2"
SHA256 = "cd5fe85aee38d108b315f408a688641478f2402622a10c677478eb7a6c4e5319"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")

# From where to where. Names that end in / are folders, whose contents are taken.
FILES = {
    "compiler/usr/bin/cudafe++": "bin/cudafe++",
    "compiler/usr/bin/fatbinary": "bin/fatbinary",
    "compiler/usr/bin/nvlink": "bin/nvlink",
    "compiler/usr/bin/ptxas": "bin/ptxas",
    "compiler/usr/lib/nvidia-cuda-toolkit/bin/nvcc": "bin/nvcc",
    "compiler/usr/lib/nvidia-cuda-toolkit/bin/crt/": "bin/crt",
    "compiler/usr/lib/nvidia-cuda-toolkit/bin/cicc": "nvvm/bin/cicc",
    "compiler/usr/lib/nvidia-cuda-toolkit/libdevice/": "nvvm/libdevice",
    "headers/nvidia/cuda_cccl/include/": "include",
    "headers/nvidia/cuda_nvcc/include/": "include",
    "headers/nvidia/cuda_runtime/include/": "include",
    "runtime/nvidia/cuda_runtime/lib/libcudart_static.a": "lib64/libcudart_static.a",
    "runtime/nvidia/cuda_runtime/lib/libcudart.so.12": "lib64/libcudart.so",  # CMake looks for it
}
PROFILE = """\
TOP = $(_HERE_)/..
CICC_PATH = $(TOP)/nvvm/bin
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(CICC_PATH):$(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib64"
"""


def main() -> None:
    """Fetch the parts and put them together. What is there already is made anew."""
    for folder in (PARTS, TOOLKIT):
        shutil.rmtree(folder, ignore_errors=True)
    PARTS.mkdir(parents=True)
    fetch_compiler()
    for name in ("headers", "runtime"):
        lock = HERE / f"{name}.lock"
        run(UV, "pip", "install", "-q", "--no-deps", "--require-hashes", "--target", PARTS / name, "-r", lock)
    for source, target in FILES.items():
        copy = shutil.copytree if source.endswith("/") else _copy_file
        copy(PARTS / source, TOOLKIT / target, dirs_exist_ok=True)
    (TOOLKIT / "bin" / "nvcc.profile").write_text(PROFILE)
    # Nothing here calls CUDA from a kernel; nvcc names the library for that in each link.
    (TOOLKIT / "lib64" / "libcudadevrt.a").write_text("!<arch>\n")
    shutil.rmtree(PARTS)


def fetch_compiler() -> None:
    """Debian's package into PARTS/compiler; nothing is installed."""
    if not (shutil.which("apt-get") and KEYRING.exists()):
        fail(f"{COMPILER} of Debian cannot be had here: apt-get or {KEYRING} is missing")
    target = ["indextargets", "--format", "$(REPO_URI)", "Identifier: Packages"]
    found = run("apt-get", *target).split()
    mirrors = [uri for uri in found if uri.rstrip("/").endswith("/debian")]
    if not mirrors:
        fail(f"{COMPILER} of Debian cannot be had here: apt's sources name no mirror of Debian, only {found}")
    apt = PARTS / "apt"
    for folder in ("lists/partial", "cache/archives/partial"):
        (apt / folder).mkdir(parents=True)
    sources = apt / "sources.list"
    sources.write_text(f"deb [signed-by={KEYRING}] {mirrors[0]} {SUITE}\n")
    places = {
        "Etc::SourceList": sources,
        "Etc::SourceParts": "/dev/null",
        "State::Lists": apt / "lists",
        "Cache": apt / "cache",
    }
    options = [f"-oDir::{name}={place}" for name, place in places.items()]
    options.append("-oAPT::Sandbox::User=")  # as who runs this, who owns the folder
    run("apt-get", *options, "-q", "update")
    run("apt-get", *options, "-q", "download", COMPILER, cwd=apt)
    (package,) = apt.glob("*.deb")
    if (digest := hashlib.sha256(package.read_bytes()).hexdigest()) != SHA256:
        fail(f"{package.name}: got SHA-256 {digest}; accepted: {SHA256}")
    run("dpkg", "-x", package, PARTS / "compiler")


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command, and return what it prints. If it fails, that is shown."""
    words = [str(part) for part in command]
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        fail(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def fail(text: str) -> None:
    """Stop, and say what would do instead."""
    raise SystemExit(
        f"flashxla: CUDA 12: {text}\nAny nvcc of CUDA 12.4 or newer will do: CUDACXX=/path/to/nvcc"
    )


def _copy_file(source: Path, target: Path, dirs_exist_ok: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=dirs_exist_ok)
    shutil.copy(source, target)


if __name__ == "__main__":
    main()
