"""Builds libflashxla_cuda.so in build/cuda, installs it into this Python's flashxla, and says what it took.

What is built stays there, so that a second run compiles only what changed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "cuda"
NINJA_LOG = BUILD / ".ninja_log"


def main() -> int:
    """Configure, build, install, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--architectures", help="compute capabilities, separated by semicolons")
    parser.add_argument("--default-architectures", help="the same, where build/cuda is not set up yet")
    args = parser.parse_args()
    if not (os.environ.get("CUDACXX") or shutil.which("nvcc")):
        print(
            "flashxla: nvcc is not on the PATH. The library for GPUs needs a CUDA toolkit, 12.4 or newer: install "
            "one, or name its compiler with CUDACXX=/path/to/nvcc. The CPU library is complete without.",
            file=sys.stderr,
        )
        return 1
    tools = Path(sys.executable).parent
    cmake = str(tools / "cmake") if (tools / "cmake").exists() else "cmake"
    ninja = tools / "ninja" if (tools / "ninja").exists() else shutil.which("ninja")

    started = time.time()
    configured = (BUILD / "CMakeCache.txt").exists()
    command = [cmake, "-S", ROOT, "-B", BUILD, "-DFLASHXLA_CUDA=ON", "--log-level=WARNING"]
    command += [f"-DFLASHXLA_XLA_INCLUDE_DIR={ROOT / 'build' / 'jaxlib' / 'jaxlib' / 'include'}"]
    architectures = args.architectures or (None if configured else args.default_architectures)
    if architectures:
        command.append(f"-DFLASHXLA_CUDA_ARCHITECTURES={architectures}")
    if not configured and ninja:
        command += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    print("== CUDA library (minutes for each kernel that is compiled anew)", flush=True)
    if subprocess.call([str(part) for part in command], stdout=subprocess.DEVNULL):
        return 1
    logged = _ninja_log()
    environment = {**os.environ, "NINJA_STATUS": "[%f/%t %es] "}
    command = [cmake, "--build", str(BUILD), "--target", "flashxla_cuda", "--parallel", str(args.jobs)]
    if subprocess.call(command, env=environment):
        return 1
    purelib = sysconfig.get_path("purelib")
    command = [cmake, "--install", str(BUILD), "--component", "cuda", "--prefix", purelib]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    _report(time.time() - started, logged)
    return 0


def _ninja_log() -> dict[str, tuple[str, float]]:
    """Of each output: the hash of its last run, and how long that took, in seconds."""
    if not NINJA_LOG.exists():
        return {}
    lines = (line.split("\t") for line in NINJA_LOG.read_text().splitlines() if not line.startswith("#"))
    return {f[3]: (f[0] + f[1] + f[2] + f[4], (int(f[1]) - int(f[0])) / 1000) for f in lines if len(f) == 5}


def _report(seconds: float, before: dict[str, tuple[str, float]]) -> None:
    times = _ninja_log()
    print(f"{'part':<44}{'size':>10}{'time':>9}")
    for path in [*sorted(BUILD.rglob("*.c[cu].o")), BUILD / "libflashxla_cuda.so"]:
        name = path.relative_to(BUILD).as_posix()
        took = f"{times[name][1]:.1f} s" if name in times else ""
        if name in times and before.get(name) == times[name]:
            took = "kept"
        part = name.rpartition(".dir/csrc/")[2].removesuffix(".o")
        print(f"{part:<44}{path.stat().st_size / 1024:>6.0f} KiB{took:>9}")
    print(f"all: {seconds:.0f} s; installed beside the CPU library")


if __name__ == "__main__":
    raise SystemExit(main())
