"""Tensor parallelism over heads in PyTorch/XLA's SPMD mode: one device's result, and no gather of a cache."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashxla.doctor import hlo
from flashxla.xla import gpu

pytest.importorskip("torch_xla")

LAYERS, CACHE_BYTES = 2, 64 * 16 * 4 * 64 * 4


@pytest.fixture(scope="module")
def environment(request: pytest.FixtureRequest) -> dict[str, str]:
    if request.config.option.device == "cpu":
        return {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}
    if gpu.count(os.environ) < 2:
        pytest.skip("needs two GPUs")
    return {**os.environ, "PJRT_DEVICE": "CUDA", "XLA_CLIENT_MEM_FRACTION": "0.1"}


def test_heads_are_sharded_without_a_gather(environment: dict[str, str], tmp_path: Path) -> None:
    environment["XLA_FLAGS"] = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    done = subprocess.run(
        [sys.executable, "-m", "tests.xla.spmd_steps"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["devices"] >= 2 and found["error"] < 1e-5
    assert found["batch_error"] < 1e-5
    assert found["specs"] == [f"{{devices=[1,1,{found['devices']},1]0,1}}"]

    assert len(found["warnings"]) >= 2, found["warnings"]
    assert all("is sharded {devices=" in w and "flashxla.torch.shard_map" in w for w in found["warnings"])
    assert any(w.startswith("paged_attention: key_cache [64, 16, 4, 64]") for w in found["warnings"])

    programs = [p for p in hlo.dumped_programs(tmp_path) if p.targets().count("flashxla_kv_cache") == LAYERS]
    assert len(programs) == 1
    (program,) = programs
    (dense,) = [
        p
        for p in hlo.dumped_programs(tmp_path)
        if "flashxla_attention" in p.targets() and "[2,20,8,64]" in p.text
    ]
    assert not re.findall(r"all-gather|all-to-all|collective-permute", dense.text)
    part = CACHE_BYTES // found["devices"]
    assert not re.findall(r"all-gather|all-to-all|collective-permute", program.text)
    assert program.copies(at_least=part) == []
    # Each cache's part is updated where it is.
    assert len(re.findall(r"\{\d+\}: \(\d+, \{\}, (?:may|must)-alias\)", program.text)) >= 2 * LAYERS
