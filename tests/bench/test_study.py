"""The study of GPUs: its counting, its watching over processes, and its sections on the CPU at tiny sizes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich")

from benchmarks import (
    attention,
    compare,
    kv_write,
    peers,
    plan,
    reference,
    results,
    sections,
    shape_lists,
    shapes,
    supervisor,
    timers,
    worker,
)
from benchmarks import batch as batches
from benchmarks.compare import Contender, Prepared, Work
from benchmarks.sections import Job
from benchmarks.settings import Settings
from benchmarks.shapes import Shape
from flashxla.bench import cli

QUICK = Settings(device="cpu", quick=True, peers=True, everything=True, rounds=1)
FULL = Settings(peers=True, everything=True)


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("lens", [((7, 7),), ((1, 9),), ((3, 20), (8, 8))])
def test_visible_pairs(lens: shapes.Lens, window: int | None):
    expected = sum(
        1
        for new, keys in lens
        for i in range(keys - new, keys)
        for j in range(keys)
        if j <= i and (window is None or i - j < window)
    )
    shape = Shape("", lens, heads=(4, 2), dim=8, window=window)
    assert shapes.visible_pairs(shape) == expected
    assert shapes.flops(shape) == 4 * 8 * 4 * expected


def test_bytes_of_keys_and_values():
    shape = Shape("", shapes.newest(10, 20), heads=(32, 8), dim=128)
    assert shapes.kv_bytes(shape) == 2 * 30 * 8 * 128 * 2
    assert shapes.kv_bytes(dataclasses.replace(shape, cache="fp8_e4m3")) == 2 * 30 * 8 * 128
    assert shapes.kv_bytes(dataclasses.replace(shape, window=12)) == 2 * 22 * 8 * 128 * 2
    case = kv_write.Write("", 64, "bfloat16", "fp8_e4m3")
    assert kv_write.work_bytes(case) == 2 * 64 * 8 * 128 * 3
    assert kv_write.num_blocks(case, 2**30) * 2 * 16 * 8 * 128 == 2**30


@pytest.mark.parametrize("section", ["prefill", "decode", "mixed", "overhead", "plan"])
@pytest.mark.parametrize("settings", [FULL, QUICK, dataclasses.replace(FULL, dtype="float32")])
def test_shape_tables(section: str, settings: Settings):
    found = shape_lists.of_section(section, settings)
    assert len({shape.name for shape in found}) == len(found) > 0
    for shape in found:
        assert all(0 < new <= keys for new, keys in shape.lens)
        assert shape.width >= max(shape.pages)
        assert shape.num_seqs >= len(shape.lens)
        assert shape.heads[0] % shape.heads[1] == 0


def test_issue_shapes():
    tokens = {
        shape.name: sum(keys for _, keys in shape.lens)
        for shape in (*shape_lists.PREFILL, *shape_lists.DECODE)
    }
    assert tokens["ragged 16k"] == 16384
    assert tokens["skew B"] == 65536 + 63 * 512
    lens = [keys for _, keys in shape_lists.named("decode", "skew A", FULL).lens]
    assert len(lens) == 64 and min(lens) >= 128 and max(lens) <= 16384


def test_sets_exceed_the_gpus_caches():
    for shape in (*shape_lists.PREFILL, *shape_lists.DECODE):
        sets = batches.num_sets(shape, "cuda")
        assert sets >= 2
        assert sets * (shapes.kv_bytes(shape) + shapes.qo_bytes(shape)) > 180 * 2**20


def test_rotation_is_whole_rounds_of_the_sets():
    for num_calls in (1, 2, 7, 48):
        for seconds in (0.0, 1e-6, 3e-5, 1.0):
            count = timers.rotation(num_calls, seconds)
            assert count % num_calls == 0 and 10 <= count <= 1100
    assert timers.rotation(2, 1.0) == 10


def test_pallas_takes_the_width():
    for width in (1, 16, 64, 128, 129, 1000, 4096):
        padded = peers.pallas_width(width)
        each = padded // 16
        assert padded >= width and padded % 16 == 0 and each % min(each, 8) == 0


def test_a_wrong_result_is_not_timed():
    batch = batches.build(shape_lists.QUICK["decode"][0], "cpu")
    right = attention.paged_calls(batch)[0]()
    assert reference.check(batch, right, ours=True) < 2e-2
    off = right.clone()
    off[-1, 0] += 0.1
    for out in (off, torch.full_like(right, torch.nan), -right):
        with pytest.raises(compare.WrongResult, match="relative error"):
            reference.check(batch, out, ours=True)

    padded = batches.build(shape_lists.QUICK["decode"][2], "cpu")
    out = attention.paged_calls(padded)[0]()
    out[-1] = 1
    with pytest.raises(compare.WrongResult, match="padded rows"):
        reference.check(padded, out, ours=True)

    def timer() -> timers.Timer:
        raise AssertionError("timed")

    wrong = Contender("wrong", lambda: Prepared(lambda: reference.check(batch, off, ours=True), timer))
    (row,) = (row for row in compare.run("case", "bfloat16", [wrong], QUICK) if "begin" not in row)
    assert row["failed"].startswith("WrongResult: wrong result: relative error")
    assert "us" not in row


def measured(section: str, settings: Settings, count: int | None = None) -> list[dict[str, Any]]:
    rows = []
    for case in sections.cases(section, settings)[:count]:
        rows += [row for row in sections.run(Job(section, case), settings) if "begin" not in row]
    return rows


@pytest.mark.parametrize("section", ["prefill", "decode", "mixed", "kv_write", "overhead", "plan"])
def test_sections(section: str):
    rows = measured(section, QUICK)
    for row in rows:
        if row.get("ours"):
            assert "failed" not in row, row
        if "us" in row and not row.get("derived"):
            assert row["us"] > 0 and row["spread"] >= 0 and row["error"] < 0.1 and row["method"]
    mine = {row["contender"] for row in rows if row.get("ours")}
    expected = {"decode": {"flashxla", "flashxla in JAX"}, "plan": {plan.SHARED, plan.EACH}}
    assert mine == expected[section] if section in expected else len(mine) >= 3
    if section in ("prefill", "decode"):
        masks = {row["case"] for row in rows if row["contender"] == "torch FlexAttention" and "us" in row}
        known = ("softcap 30", "ALiBi", "window 9", "window 1024", "sinks")
        assert masks == {f"2 x 40, {mask}" for mask in known}
    if section == "kv_write":
        theirs = {row["contender"] for row in rows if not row["ours"] and "us" in row}
        assert theirs == {
            "torch index_put_",
            "JAX donated scatter",
            "JAX donated scatter, a program a call",
        }
    json.dumps(rows, allow_nan=False)


def test_the_steps_model_decodes_like_a_dense_one():
    """Token by token over a paged cache, against all tokens at once with a causal mask."""
    import functools

    import jax
    import jax.numpy as jnp

    from benchmarks import llama, llama_jax, ways

    config = llama.Config(layers=2, hidden=64, heads=(4, 2), dim=32, mlp=96, vocab=50)
    params = llama_jax.init(config, "float32")
    tokens = jax.random.randint(jax.random.key(3), (2, 20), 0, config.vocab)

    def causal(config: llama.Config, qkv: Any, cache: Any, batch: Any) -> Any:
        q, k, v = jnp.split(qkv.reshape(2, 20, -1, config.dim), (4, 6), axis=2)
        return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(40, -1, config.dim), cache

    flat = {"context_lens": jnp.tile(jnp.arange(1, 21), 2)}
    dense, _ = jax.jit(functools.partial(llama_jax.step, config, causal))(
        params, [()] * 2, tokens.reshape(-1), flat
    )

    for way in (ways.OURS, ways.GATHER):
        batch = {name: jnp.asarray(x) for name, x in llama.batch(2, 20).items()}
        caches = [way.cache(config, batch["tables"].size, "float32") for _ in range(2)]
        step = jax.jit(functools.partial(llama_jax.step, config, way.attend))
        for i in range(20):
            page, offset = divmod(i, llama.PAGE)
            now = {
                **batch,
                "context_lens": jnp.full(2, i + 1, jnp.int32),
                "slots": batch["tables"][:, page] * llama.PAGE + offset,
            }
            logits, caches = step(params, caches, tokens[:, i], now)
            expected = dense.reshape(2, 20, -1)[:, i]
            assert float(jnp.abs(logits - expected).max()) < 1e-4, (way.name, i)


def test_weights_read_counts_the_parameters():
    import jax

    from benchmarks import llama, llama_jax

    config = llama.Config(layers=2, hidden=64, heads=(4, 2), dim=32, mlp=96, vocab=50)
    params = llama_jax.init(config, "float32")
    del params["embed"]
    assert config.weights_read == sum(x.size for x in jax.tree.leaves(params))
    assert 7.4e9 < llama.Config().weights_read < 7.6e9


def test_figures_and_ratios():
    work = Work(8e6, "TB/s", "copy")
    figures = compare.figures([[2e-6, 2e-6], [4e-6, 4e-6]], work)
    assert math.isclose(figures["us"], 3.0) and math.isclose(figures["spread"], 1.0)
    assert math.isclose(figures["rate"], 8e6 / 3e-6 / 1e12)

    def row(contender: str, us: float, ours: bool) -> dict[str, Any]:
        rate = {"rate": 8.0 / us, "unit": "TB/s", "ceiling": "copy"}
        return {"case": "a", "dtype": "bfloat16", "contender": contender, "ours": ours, "us": us, **rate}

    rows = [row("peer", 4.0, False), row("flashxla", 2.0, True), row("flashxla, dense", 1.0, True)]
    measured = [{"copy": {"name": "copy", "rate": rate, "unit": "TB/s"}} for rate in (3.9, 4.1)]
    judged = results.judged(rows, results.combined(measured))
    assert [one["ours_is_faster"] for one in judged] == [2.0, 1.0, 0.5]
    assert [round(one["of_ceiling"], 6) for one in judged] == [0.5, 1.0, 2.0]


def test_the_worker_says_what_it_does():
    messages: list[dict[str, Any]] = []
    settings = dataclasses.replace(QUICK, peers=False)
    jobs = [Job("decode", "2 x 40"), Job("decode", "no such case")]
    assert worker.measure(jobs, settings, messages.append) == 0
    kinds = [kind for message in messages for kind in message]
    assert kinds[:3] == ["facts", "ceilings", "begin"] and kinds[-1] == "ceilings"
    assert [message["begin"] for message in messages if "begin" in message] == [
        [None, False],
        ["flashxla", True],
        ["flashxla in JAX", True],
        ["timing", False],
        [None, False],
    ]
    rows = [message["row"] for message in messages if "row" in message]
    assert ["failed" in row for row in rows] == [False, False, True] and kinds.count("end") == 2
    json.dumps(messages)


FAKE_WORKER = """
import json, os, sys, time
request = json.loads(sys.argv[4])
def emit(**message): print(json.dumps(message), flush=True)
emit(facts={})
for job in request["jobs"]:
    case = job["case"]
    emit(begin=[None, False])
    for name in ("good", "bad"):
        if [case, name] in request["settings"]["avoid"]:
            continue
        emit(begin=[name, name == "bad"])
        if name == "bad" and case == "2 x 40":
            print("segmentation fault", file=sys.stderr)
            os._exit(9)
        if name == "bad" and case == "skew":
            time.sleep(60)
    emit(begin=["timing", False])
    if "fp8" in case:
        os._exit(4)
    emit(row={"contender": "good", "us": 1.0})
    if "padded" in case:
        emit(begin=["kernels of good", False])
        os._exit(5)
    emit(end=None)
"""


def fake_worker(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "worker.py"
    script.write_text(f"#!{sys.executable}\n{text}")
    script.chmod(0o755)
    monkeypatch.setattr(supervisor.sys, "executable", str(script))


def test_crashes_and_hangs_cost_one_contender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake_worker(FAKE_WORKER, tmp_path, monkeypatch)
    monkeypatch.setattr(supervisor, "SILENCE_SECONDS", 3.0)
    saved: list[int] = []
    settings = dataclasses.replace(QUICK, everything=False)
    findings = supervisor.run(["decode"], settings, lambda f: saved.append(len(f.rows["decode"])))
    rows = findings.rows["decode"]
    assert [row["case"] for row in rows if "us" in row] == ["2 x 40", "skew", "2 x 40, padded to 5"]
    failed = {row["case"]: (row["contender"], row["ours"], row["failed"]) for row in rows if "failed" in row}
    assert failed["2 x 40"] == ("bad", True, "the process ended with 9: segmentation fault")
    assert failed["skew"] == ("bad", True, "nothing happened for 3 s")
    assert failed["2 x 40, padded to 5"] == ("kernels of good", False, "the process ended with 5: ")
    assert failed["2 x 40, fp8 cache"] == ("all", False, "timing: the process ended with 4: ")
    assert saved == sorted(saved) and len(saved) >= 4


def test_workers_that_do_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake_worker("import sys\nsys.exit('no GPU')\n", tmp_path, monkeypatch)
    findings = supervisor.run(["mixed"], QUICK, lambda findings: None)
    (row,) = findings.rows["mixed"]
    assert row["contender"] == "all" and row["failed"] == "not measured: the process ended with 1: no GPU"


def test_xla_merges_what_is_one_argument():
    """The programs of overhead and plan count on it: one array of lengths for all, or an equal one for each."""
    import jax

    lens = jax.numpy.ones(3)
    program = jax.jit(lambda all_lens: sum(jax.numpy.sin(all_lens[i % len(all_lens)]) for i in range(8)))
    sines = [program.lower([lens] * count).compile().as_text().count(" sine(") for count in (1, 8)]
    assert sines == [1, 8]


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    words = [
        "mixed",
        "--device",
        "cpu",
        "--quick",
        "--peers",
        "--rounds",
        "1",
        "--json",
        str(tmp_path / "out"),
    ]
    try:
        import matplotlib  # noqa: F401

        words += ["--plot", str(tmp_path / "out")]
    except ImportError:
        pass
    assert cli.run(parser.parse_args(words)) == 0
    content = json.loads((tmp_path / "out" / "mixed.json").read_text())
    assert (
        content["command"] == "flashxla bench mixed --peers --quick --dtype bfloat16 --device cpu --rounds 1"
    )
    rows = {row["contender"]: row for row in content["results"]["mixed"]}
    assert rows["flashxla"]["ours_is_faster"] == 1.0
    assert rows["2 calls"]["us"] > 0
    assert set(content["ceilings"]) == {"copy", "matmul"}
    assert "--plot" not in words or "</svg>" in (tmp_path / "out" / "mixed.svg").read_text()
    assert "2 decode rows of 40" in capsys.readouterr().out

    assert cli.run(parser.parse_args(["step", "--device", "cpu"])) == 2
    assert "with --quick it runs on the cpu" in capsys.readouterr().err


def test_a_training_step_is_the_same_with_both_attentions(tmp_path: Path):
    file = tmp_path / "steps.json"
    command = [sys.executable, "-m", "benchmarks.train_step", "--quick", "--json", str(file)]
    subprocess.run(command, check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    for name, case in json.loads(file.read_text())["cases"].items():
        assert case["flashxla"]["loss"] == pytest.approx(case["xla"]["loss"], rel=1e-2), name
        assert case["xla"]["gradient_error"] < 2e-2, name
