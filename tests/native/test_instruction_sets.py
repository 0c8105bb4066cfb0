"""The conformance tests on each instruction set that this machine has; tests/ops has them on the one in use."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = ("baseline", "avx2", "avx512", "avx512_bf16")  # each has what those before it have
CONFORMANCE = (
    "test_flash_attn_varlen.py",
    "test_flash_attn_backward.py",
    "test_paged_attention.py",
    "test_ragged_paged_attention.py",
    "test_kv_cache.py",
    "test_merge_states.py",
    "test_engines.py",
    "test_strides.py",
    "test_index_tensors.py",
    "test_random_calls.py",
    "test_batch_invariance.py",
)

pytest.importorskip("torch")


def in_a_process(name: str, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FLASHXLA_CPU_ISA": name}
    for variable in [v for v in environment if v.startswith("PYTEST_")]:
        del environment[variable]
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=800
    )


SAY = "from flashxla import native; print(native.library('cpu').instruction_set)"


def usual() -> str:
    """What is used where none is named."""
    with_none_named = {k: v for k, v in os.environ.items() if k != "FLASHXLA_CPU_ISA"}
    return subprocess.check_output([sys.executable, "-c", SAY], env=with_none_named, text=True).strip()


def supported() -> list[str]:
    """What this machine has."""
    refusal = in_a_process("none", "-c", SAY).stderr.strip()
    return refusal.rpartition("accepted on this machine: ")[2].split(", ")


HERE = supported()


@pytest.mark.parametrize("name", [name for name in HERE if name != usual()])
def test_conformance(request: pytest.FixtureRequest, name: str) -> None:
    option = request.config.option
    if option.device != "cpu":
        pytest.skip("the CPU's instruction sets")
    files = [str(ROOT / "tests" / "ops" / file) for file in CONFORMANCE]
    options = ("-q", "-p", "no:cacheprovider", "--frontends", "torch", "--random-seconds", "8")
    thinned = ("--one-in", str(option.one_in_on_other_isas), "--seed", str(option.seed))
    done = in_a_process(name, "-m", "pytest", *files, *options, *thinned)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 3000 / option.one_in_on_other_isas, done.stdout[-500:]


@pytest.mark.parametrize("name", NAMES)
def test_it_is_chosen(name: str) -> None:
    done = in_a_process(name, "-c", SAY)
    if name in HERE:
        assert done.stdout.strip() == name, done.stderr
    else:
        assert (
            f"ValueError: FLASHXLA_CPU_ISA: got '{name}'; accepted on this machine: baseline" in done.stderr
        )


def test_the_usual_one_is_the_fastest() -> None:
    """Products of bfloat16 pairs are slow on Intel's processors."""
    assert list(NAMES[: len(HERE)]) == HERE
    best = HERE[-1]
    if best == "avx512_bf16" and "AuthenticAMD" not in Path("/proc/cpuinfo").read_text():
        best = "avx512"
    assert usual() == best


@pytest.mark.parametrize("name", ["sse", "AVX2", "avx2 "])
def test_a_wrong_name_is_refused(name: str) -> None:
    code = (
        "import torch, flashxla.torch as fx\nz = torch.zeros(1, 1, 1)\nfx.merge_attn_states(z, z[0], z, z[0])"
    )
    done = in_a_process(name, "-c", code)
    assert done.returncode == 1
    message = rf"merge_attn_states: FLASHXLA_CPU_ISA: got '{name}'; accepted on this machine: baseline.*"
    assert re.search(message, done.stderr), done.stderr
