"""Builds what a release uploads, into dist: python wheels/build.py (what) (options).

cpu: flashxla's wheels, one for each processor, and its sdist. cuda: the wheel with the library for NVIDIA GPUs, of the
CUDA version that nvcc has. Both need the environment of wheels/requirements.lock (make wheel, make wheel-cuda).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import zig

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
BUILD = ROOT / "build" / "wheels"
TOOLS = Path(sys.executable).parent
OLDEST_CUDA = (12, 4)  # the oldest nvcc that was tried
KNOWS_BLACKWELL = (12, 8)


def main() -> int:
    """Build what is asked for, and print the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = parser.add_subparsers(dest="what", required=True)
    kinds.add_parser("cpu")
    cuda = kinds.add_parser("cuda")
    cuda.add_argument("--architectures", help="as CMake names them, separated by semicolons; default: all")
    cuda.add_argument("--cuda", type=int, help="the CUDA version that nvcc must have")
    cuda.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    DIST.mkdir(exist_ok=True)
    if args.what == "cpu":
        remove("flashxla-*")
        archive = sdist()
        # From the sdist, so that it is known to build, and to be whole.
        source = unpack(archive)
        files = [archive, *(wheel("flashxla", source, processor, {}) for processor in zig.PROCESSORS)]
    else:
        nvcc = find_nvcc()
        if args.cuda not in (None, nvcc.version[0]):
            raise SystemExit(f"flashxla: CUDA={args.cuda}: {nvcc.path} is of CUDA {nvcc.release}")
        remove(f"flashxla_cuda{nvcc.version[0]}-*")
        files = [cuda_wheel(nvcc, args.architectures or default_architectures(nvcc.version), args.jobs)]
    for file in files:
        print(f"{file.stat().st_size / 1e6:6.2f} MB  dist/{file.name}")
    return 0


def remove(pattern: str) -> None:
    """Remove what an earlier run left in dist."""
    for old in DIST.glob(pattern):
        old.unlink()


def sdist() -> Path:
    """flashxla's source distribution."""
    return _build(ROOT, "--sdist", DIST, {}, {})


def unpack(archive: Path) -> Path:
    """The source tree of an sdist."""
    folder = BUILD / "sdist"
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    # Its files are all of one date, by which no build knows what changed.
    for processor in zig.PROCESSORS:
        shutil.rmtree(BUILD / f"flashxla-{processor}", ignore_errors=True)
    return source


def wheel(name: str, project: Path, processor: str, options: dict[str, str], jobs: int = 2) -> Path:
    """A project's wheel for a processor, with the platform tag that auditwheel finds true."""
    build = BUILD / f"{name}-{processor}"
    made = build / "untagged"
    shutil.rmtree(made, ignore_errors=True)
    raw = _build(
        project,
        "--wheel",
        made,
        {
            "build-dir": str(build / "cmake"),
            "cmake.define.CMAKE_SYSTEM_NAME": "Linux",
            "cmake.define.CMAKE_SYSTEM_PROCESSOR": processor,
            # A symbol that nothing defines is an error of the build, not of the first call.
            "cmake.define.CMAKE_SHARED_LINKER_FLAGS": "-Wl,-z,defs",
            "install.strip": "false",  # strip knows the processor of this machine alone
            **options,
        },
        {
            "CXX": zig.command(processor),
            "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs),
            # What Python takes for the platform when it builds for another.
            "_PYTHON_HOST_PLATFORM": f"linux-{processor}",
        },
    )
    tagged = build / "tagged"
    shutil.rmtree(tagged, ignore_errors=True)
    _run(["auditwheel", "repair", "--plat", "auto", "--only-plat", "-w", tagged, raw])
    (file,) = tagged.glob("*.whl")
    if not file.stem.endswith(zig.platform(processor)):
        raise SystemExit(
            f"flashxla: {file.name} needs more than {zig.platform(processor)}: auditwheel show -v {raw}"
        )
    return Path(shutil.copy(file, DIST))


class Nvcc(NamedTuple):
    """A CUDA compiler."""

    path: str
    version: tuple[int, int]

    @property
    def release(self) -> str:
        """Its version, as NVIDIA writes it."""
        return ".".join(map(str, self.version))


def default_architectures(version: tuple[int, int]) -> str:
    """What a wheel has code for. PTX serves newer cards: of 10.0, or of 9.0 where nvcc does not know those yet."""
    return f"80;89;90a;{100 if version >= KNOWS_BLACKWELL else 90}-virtual"


def cuda_wheel(nvcc: Nvcc, architectures: str, jobs: int) -> Path:
    """The wheel with libflashxla_cuda.so, named after the CUDA version of nvcc."""
    version = nvcc.version
    name = f"flashxla-cuda{version[0]}"
    project = BUILD / name
    module = project / "src" / name.replace("-", "_")
    shutil.rmtree(project, ignore_errors=True)
    module.mkdir(parents=True)
    shutil.copy(ROOT / "LICENSE", project)
    with open(ROOT / "pyproject.toml", "rb") as file:
        flashxla = tomllib.load(file)
    values = {
        "NAME": name,
        "MODULE": module.name,
        "CUDA": str(version[0]),
        "VERSION": flashxla["project"]["version"],
        "REQUIRES": ", ".join(f'"{requirement}"' for requirement in flashxla["build-system"]["requires"]),
        "ARCHITECTURES": architectures.replace(";", ", "),
        "SOURCE": os.path.relpath(ROOT, project),
    }
    template = ROOT / "wheels" / "cuda"
    for source, target in (
        ("pyproject.toml.in", project / "pyproject.toml"),
        ("README.md.in", project / "README.md"),
        ("__init__.py.in", module / "__init__.py"),
    ):
        text = (template / source).read_text()
        target.write_text(re.sub("@([A-Z]+)@", lambda match: values[match[1]], text))
    # CMake keeps the compiler that it found, or that it found none.
    cache = BUILD / f"{name}-x86_64" / "cmake" / "CMakeCache.txt"
    if cache.exists() and f"={nvcc.path}\n" not in cache.read_text():
        shutil.rmtree(cache.parent)
    options = {
        "cmake.define.FLASHXLA_CUDA_ARCHITECTURES": architectures,
        "cmake.define.CMAKE_CUDA_COMPILER": nvcc.path,
    }
    return wheel(name, project, "x86_64", options, jobs)


def find_nvcc() -> Nvcc:
    """The compiler that CUDACXX names, or the one on the PATH."""
    named = os.environ.get("CUDACXX") or "nvcc"
    path = shutil.which(named)
    if path is None:
        raise SystemExit(
            f"flashxla: {named}: not found. Install a CUDA toolkit, name its compiler with CUDACXX=/path/to/nvcc, "
            "or let make wheel-cuda CUDA=12 fetch one"
        )
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"release (\d+)\.(\d+)", text)
    if match is None:
        raise SystemExit(f"flashxla: {path} --version names no release: {text!r}")
    nvcc = Nvcc(path, (int(match[1]), int(match[2])))
    if nvcc.version < OLDEST_CUDA:
        oldest = ".".join(map(str, OLDEST_CUDA))
        raise SystemExit(f"flashxla: {path} is of CUDA {nvcc.release}; a wheel needs {oldest} or newer")
    return nvcc


def _build(
    project: Path, kind: str, target: Path, options: dict[str, str], environment: dict[str, str]
) -> Path:
    """Let the project's build backend make a file, without an environment of its own: this one has what it needs."""
    command: list[str | Path] = [
        "uv",
        "build",
        kind,
        "--no-build-isolation",
        "--python",
        sys.executable,
    ]
    command += ["--out-dir", target, *(f"-C{name}={value}" for name, value in options.items()), project]
    before = {file: file.stat().st_mtime_ns for file in target.glob("flashxla*")}
    _run(command, environment)
    (file,) = (f for f in target.glob("flashxla*") if before.get(f) != f.stat().st_mtime_ns)
    return file


def _run(command: Sequence[str | Path], environment: dict[str, str] | None = None) -> None:
    """Run one of the tools of this environment; what it says is shown if it fails."""
    path = f"{TOOLS}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, "PATH": path, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}\nflashxla: failed: {' '.join(map(str, command))}")


if __name__ == "__main__":
    raise SystemExit(main())
