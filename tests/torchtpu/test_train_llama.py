"""The benchmark of whole training steps runs, and tells right losses from wrong ones."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import train_llama


def test_it_runs(tmp_path: Path) -> None:
    if os.environ.get("PJRT_DEVICE") == "CUDA":
        pytest.skip("tiny shapes, for CPUs")
    file = tmp_path / "losses.json"
    words = ["--device", "cpu", "--quick", "--dtypes", "float32", "--json", str(file)]
    command = [sys.executable, "-m", "benchmarks.train_llama", *words]
    # As users call it: by itself `import torch` would start TorchTPU.
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    root = Path(__file__).parents[2]
    ended = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
    (found,) = json.loads(file.read_text())["results"].values()
    assert list(found["rows"]) == list(train_llama.CONTENDERS)
    for name, row in found["rows"].items():
        assert len(row["losses"]) == found["work"]["steps"] and row["difference"] < 1e-5
        assert (set(row["calls"]) == set(train_llama.OPERATIONS)) is (name != train_llama.TORCH)


def test_a_process_that_hangs_is_given_up() -> None:
    work = dataclasses.replace(train_llama.Work.quick("cpu", "float32"), limit=0.01)
    ((_, row),) = train_llama.compare(work, [train_llama.TORCH])
    assert row == {"failed": "the process took longer than 0.01 s"}


def test_the_size_of_the_model() -> None:
    with torch.device("meta"):
        model = train_llama.model(train_llama.Work("cpu", "float32"), "sdpa")
    assert sum(x.numel() for x in model.parameters()) > 100e6


CALLS = dict.fromkeys(train_llama.OPERATIONS, 1)


@pytest.mark.parametrize(
    ("row", "right"),
    [
        ({"difference": 0.009, "calls": CALLS}, True),
        ({"difference": 0.011, "calls": CALLS}, False),
        ({"difference": float("nan"), "calls": CALLS}, False),
        ({"difference": 0.0, "calls": {"flash_attn_varlen": 1}}, False),
        ({"failed": "the process ended with 1"}, False),
    ],
)
def test_what_is_right(row: dict[str, object], right: bool) -> None:
    assert train_llama.is_right(train_llama.COMPILED, row) is right


def test_commands_do_not_start_torchtpu_by_importing_pytorch() -> None:
    """Which ends a process that has named no plugin."""
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    command = [
        sys.executable,
        "-m",
        "flashxla",
        "bench",
        "prefill",
        "--frontend",
        "torch",
        "--only",
        "no such case",
    ]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2 and "--only" in ended.stderr, ended.stderr[-3000:]
