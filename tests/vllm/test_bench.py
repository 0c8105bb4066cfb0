"""`flashxla bench vllm`: its peer is right, its counts of work are right, and it runs."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flashxla_vllm.attention import Mask, attend
from flashxla_vllm.bench import command, model, report

from tests.vllm.engine import engine


def test_the_peer_writes_the_same_tokens(checkpoint, hf_tokens, monkeypatch):
    monkeypatch.setenv("FLASHXLA_VLLM_ATTENTION", "xla")
    with engine(checkpoint("llama"), num_gpu_blocks_override=64) as running:
        assert running.greedy() == hf_tokens("llama")


def lower_attention(mask, dtype=jnp.float32, sinks=None):
    """The program of a layer's attention, as text."""
    cache = jnp.zeros((4, 16, 2, 64), dtype)
    query, key = jnp.ones((4, 4, 32)), jnp.ones((4, 2, 32))
    index = [jnp.asarray(x, jnp.int32) for x in ([4], [[0]], [0, 4], [1])]
    program = jax.jit(lambda *arrays: attend(mask, *arrays[:4], sinks, None, *arrays[4:]))
    return program.lower(cache, query, key, key, *index).as_text()


def test_the_peer_is_xla_alone(monkeypatch):
    assert "custom_call" in lower_attention(Mask(1.0))
    monkeypatch.setenv("FLASHXLA_VLLM_ATTENTION", "xla")
    assert "custom_call" not in lower_attention(Mask(1.0))


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (Mask(1.0, sliding_window=8), {}),
        (Mask(1.0, soft_cap=5.0), {}),
        (Mask(1.0), {"sinks": jnp.ones(4)}),
        (Mask(1.0), {"dtype": jnp.float8_e4m3fn}),
    ],
    ids=["window", "softcap", "sinks", "fp8"],
)
def test_the_peer_refuses_what_it_has_not(mask, options, monkeypatch):
    monkeypatch.setenv("FLASHXLA_VLLM_ATTENTION", "xla")
    with pytest.raises(NotImplementedError, match="FLASHXLA_VLLM_ATTENTION"):
        lower_attention(mask, **options)


def test_work_of_llama_3_8b(tmp_path):
    """8.03e9 parameters, 0.525e9 of them embeddings, which are not multiplied; 128 KiB of cache a token."""
    work = model.write(tmp_path, quick=False)
    assert work.weight_bytes == pytest.approx(2 * (8.03e9 - 0.525e9), rel=1e-3)
    assert work.flops_per_token == pytest.approx(2 * (8.03e9 - 2 * 0.525e9), rel=1e-3)
    assert work.cache_bytes_per_token == 128 << 10
    ceilings = {"matmul": 800e12, "copy": 4e12}
    assert work.floor(8192, 0, 0, ceilings) == pytest.approx(8192 * work.flops_per_token / 800e12)
    assert work.floor(0, 2, 1000, ceilings) == pytest.approx(2 * (work.weight_bytes + (1000 << 17)) / 4e12)


def test_it_runs(tmp_path):
    arguments = ["bench", "vllm", "--quick", "--device", "cpu", "--json"]
    file = tmp_path / "results.json"
    ended = subprocess.run(
        [sys.executable, "-m", "flashxla", *arguments, str(file)], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    content = json.loads(file.read_text())
    assert report.tables(content) in ended.stdout
    ours = content["engines"][command.OURS]
    assert [case["batch"] for case in ours["steps"]["cases"]] == [1, 4]
    assert all(case["ms"] > 0 for case in ours["steps"]["cases"])
    assert all(0 < case["share of the ceilings"] < 1 for case in ours["offline"]["cases"])
    assert [case["completed"] for case in ours["serving"]] == [8]
    assert all(case["p99_ttft_ms"] >= case["p50_ttft_ms"] > 0 for case in ours["serving"])


def test_the_documented_figures_are_the_files():
    content = json.loads(Path("docs/benchmarks/h200-vllm.json").read_text())
    assert report.tables(content) in Path("docs/vllm.md").read_text()
