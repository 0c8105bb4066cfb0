"""Random valid and hostile calls of the CUDA library under compute-sanitizer."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda import smoke

ROOT = Path(__file__).parents[2]
# memcheck looks at each access of memory, racecheck at those of shared memory.
OPTIONS = {"memcheck": ("--leak-check", "no", "--padding", "4096"), "racecheck": ()}
CALLS = {"memcheck": 160, "racecheck": 80}
FOUND = 9  # the exit status when the sanitizer reports something and the program ends well


@pytest.fixture
def sanitizer(gpu: None) -> str:
    path = shutil.which("compute-sanitizer")
    if path is None:
        pytest.skip("needs compute-sanitizer")
    try:
        smoke.Gpu()
    except smoke.CudaError as error:
        pytest.skip(str(error))
    return path


def drive(sanitizer: str, tool: str, *arguments: object) -> tuple[int, str]:
    """The exit status and the output of the calls under a tool."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", FOUND, *OPTIONS[tool]]
    command += [sys.executable, "-m", "tests.cuda.smoke", *arguments]
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("tool", OPTIONS)
def test_random_calls(sanitizer: str, request: pytest.FixtureRequest, tool: str) -> None:
    seed = request.config.option.seed
    print(f"{tool}: seed {seed}")
    status, output = drive(sanitizer, tool, seed, CALLS[tool])
    assert status == 0, output[-8000:]
    assert re.search(r"SUMMARY: .*\b0 errors", output), output[-2000:]
    assert f"done: {CALLS[tool]} calls of seed {seed}" in output
    served = output.rpartition("done: ")[2]
    engines = [
        "split",
        "split32",
        "tile",
        "tile32",
        "large",
        "large_split",
        "general",
        "tile of gradients",
        "tile32 of gradients",
        "general of gradients",
        "aligned copies",
    ]
    if re.search(r"\bwide \d", served):  # on Hopper
        engines += [
            "swap",
            "swap of pairs",
            "swap of many",
            "swap of copies",
            "wide of fixed parts",
            "wide of several heads",
            "wide of odd heads",
            "wide of gradients",
        ]
    for engine in engines:
        assert re.search(rf"\b{engine} \d", served), engine


def test_the_harness_can_fail(sanitizer: str) -> None:
    """A write one block behind a cache is reported."""
    status, output = drive(sanitizer, "memcheck", 0, 0, "--overrun")
    assert status != 0, output[-8000:]  # the program's own status if that is an error too
    assert "Invalid __global__ write" in output
