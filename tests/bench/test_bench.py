"""Every case and contender at the smallest sizes: the bench holds their results against each other itself."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import math
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich")

from flashxla.bench import cli, machine, runner
from flashxla.bench.topic import Options, Peer, Run

ROW = {
    "case": str,
    "dtype": str,
    "contender": str,
    "seconds": float,
    "fastest_seconds": float,
    "samples": int,
    "rate": float,
    "unit": str,
    "ceiling": str,
    "ceiling_rate": float,
    "of_ceiling": float,
    "ours_is_faster": float,
    "max_difference": float,
}
STRATEGY_ROW = {
    "strategy": str,
    "mode": str,
    "bytes": int,
    "works": bool,
    "pointer_stays": bool,
    "seconds": float,
    "fastest_seconds": float,
    "samples": int,
    "growth": float,
}


def run_bench(tmp_path: Path, *words: str) -> dict[str, Any]:
    """Run the command line; returns the JSON document. Checks the plot."""
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    report, plot = tmp_path / "report.json", tmp_path / "plot.svg"
    files = ["--json", str(report)]
    if importlib.util.find_spec("matplotlib"):
        files += ["--plot", str(plot)]
    threads = torch.get_num_threads()
    try:
        assert (
            cli.run(parser.parse_args([*words, "--device", "cpu", "--quick", "--rounds", "2", *files])) == 0
        )
    finally:
        torch.set_num_threads(threads)
    assert "--plot" not in files or plot.read_text().rstrip().endswith("</svg>")
    return json.loads(report.read_text())


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC", "2")  # the command line sets it for its process


@pytest.mark.parametrize("name", cli.TOPICS)
def test_topic_and_peers(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    document = run_bench(tmp_path, name, "--peers")
    assert document["schema"] == 1
    assert document["command"].startswith(f"flashxla bench {name} --peers")
    assert document["machine"]["cores"] >= 1
    assert document["versions"]["torch"] == torch.__version__.split("+")[0]
    assert document["options"]["threads"] == 2
    rows = document["results"][name]
    for row in rows:
        assert {field: type(value) for field, value in row.items()} == ROW
        assert all(
            math.isfinite(row[field]) and row[field] > 0 for field in ("seconds", "rate", "of_ceiling")
        )
        if row["contender"] == "flashxla":
            assert row["ours_is_faster"] == 1.0

    topic = importlib.import_module(f"flashxla.bench.{name}").TOPIC
    for case in topic.cases["quick"]:
        serving = {"flashxla", *(peer.name for peer in topic.peers if peer.serves(case, "cpu"))}
        for dtype in ("float32", "bfloat16"):
            assert {r["contender"] for r in rows if (r["case"], r["dtype"]) == (case.name, dtype)} == serving
    on_cpu = {p.name for p in topic.peers if any(p.serves(case, "cpu") for case in topic.cases["cpu"])}
    assert on_cpu <= {row["contender"] for row in rows}
    assert topic.cases["cpu"][0].name not in capsys.readouterr().out


@pytest.mark.parametrize("name", cli.TOPICS)
def test_cases_are_well_formed(name: str):
    topic = importlib.import_module(f"flashxla.bench.{name}").TOPIC
    assert set(topic.cases) == {"cpu", "cuda", "quick"}
    for cases in topic.cases.values():
        assert len({case.name for case in cases}) == len(cases)
        assert all(topic.work(case, torch.float32) > 0 for case in cases)


def test_without_peers_only_ours_is_timed_but_checked():
    topic = importlib.import_module("flashxla.bench.kv_write").TOPIC
    options = Options(dtypes=("float32",), rounds=1, quick=True, threads=torch.get_num_threads())
    assert [row["contender"] for row in runner.run(topic, options)] == ["flashxla"]

    def wrong(problem: Any) -> Run:
        good = topic.ours.build(problem)
        return Run(good.call, lambda result: [tensor + 1 for tensor in good.results(result)])

    broken = dataclasses.replace(topic, ours=Peer("flashxla", wrong))
    with pytest.raises(RuntimeError, match="kv_write 5 tokens: torch index_copy_ and flashxla disagree"):
        runner.run(broken, options)


def test_a_peer_without_memory_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from flashxla.bench import backward

    def sdpa(*args: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 34.36 GB")

    monkeypatch.setattr(backward, "sdpa", sdpa)
    case = backward.TOPIC.cases["quick"][0]
    topic = dataclasses.replace(backward.TOPIC, cases={"quick": (case,)})
    options = Options(dtypes=("float32",), rounds=1, quick=True, peers=True, threads=torch.get_num_threads())
    contenders = {row["contender"] for row in runner.run(topic, options)}
    assert "flashxla" in contenders
    assert "sdpa" not in contenders
    assert f"{case.name}: sdpa not measured: Tried to allocate" in capsys.readouterr().err


def test_growth(tmp_path: Path):
    from flashxla.bench import growth

    rows = run_bench(tmp_path, "growth", "--dtype", "float32")["results"]["growth"]
    assert [(row["series"], row["size"]) for row in rows] == [
        (series.name, size) for series in growth.SERIES for size in series.sizes["quick"]
    ]
    for row in rows:
        assert row["limit"] in (growth.COPY, growth.MATMUL)
        assert row["limit_seconds"] > 0 and row["seconds"] > 0


def test_growth_counts_the_work():
    from flashxla.bench import growth

    sequences, queries, keys, (q_heads, kv_heads), dim = 2, 3, 20, (4, 2), 8
    batch = growth.Batch(sequences, queries, keys, rows=5, columns=9)
    problem = growth.Problem(batch, (q_heads, kv_heads), dim, torch.float32, torch.device("cpu"))
    elements = 2 * keys * kv_heads + 2 * queries * q_heads  # keys and values; queries and results
    assert problem.bytes == 4 * sequences * elements * dim
    assert problem.flops == 4 * dim * q_heads * sequences * (18 + 19 + 20)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_growth_grows(device: str):
    from flashxla.bench import growth

    for series in growth.SERIES:
        sizes = series.sizes[device]
        assert len(sizes) > 2
        assert list(sizes) == sorted(set(sizes))
        batches = [series.batch(size) for size in sizes]
        assert all(batch.sequences > 0 and batch.queries <= batch.keys for batch in batches)
        assert len(set(batches)) == len(sizes)


def test_growth_is_checked(monkeypatch: pytest.MonkeyPatch):
    from flashxla.bench import growth

    call = growth.Problem.call
    monkeypatch.setattr(growth.Problem, "call", lambda self: call(self) + 1)
    options = Options(dtypes=("float32",), rounds=1, quick=True, threads=torch.get_num_threads())
    with pytest.raises(RuntimeError, match=r"growth: .* disagree"):
        growth.run(options)


def test_strategies(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("torch_xla")
    from flashxla.bench import strategies

    document = run_bench(tmp_path, "strategies", "--dtype", "float32")
    rows = document["results"]["strategies"]
    failed = {(row["strategy"], row["mode"]): row["error"] for row in rows if not row["works"]}
    # torch.compile traces with fake tensors, for which a bare XLA call has no meaning.
    assert set(failed) == {("direct, .data", "openxla")}
    assert "Expected all tensors in the given list to be XLA tensors" in failed["direct, .data", "openxla"]

    lines = {(s.name, mode) for s in strategies.STRATEGIES for mode in strategies.MODES} - set(failed)
    measured = [row for row in rows if row["works"]]
    assert {(row["strategy"], row["mode"]) for row in measured} == lines
    assert len(measured) == len(lines) * len(strategies.QUICK_SIZES)
    for row in measured:
        extra = row.pop("extra_bytes")
        assert extra is None or extra >= 0
        assert {field: type(value) for field, value in row.items()} == STRATEGY_ROW
        if row["strategy"] == "aliased op":
            assert row["pointer_stays"]
        if row["strategy"] == "clone and return":
            assert not row["pointer_stays"]
    assert "aliased op" in capsys.readouterr().out


def test_a_crashed_process_is_a_result(monkeypatch: pytest.MonkeyPatch):
    from flashxla.bench import strategies

    def crashes(threads: int) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), os._exit, (1,))

    monkeypatch.setattr(strategies, "_new_process", crashes)
    rows = strategies.run(Options(quick=True))
    assert len(rows) == len(strategies.STRATEGIES) * len(strategies.MODES)
    assert all(not row["works"] and row["error"] == "the process crashed" for row in rows)


@pytest.mark.parametrize(
    ("module", "words", "extra"),
    [
        ("rich", ["decode"], "bench"),
        ("matplotlib", ["decode", "--plot", "x.svg"], "bench"),
        ("torch_xla", [], "torch-xla"),
    ],
)
def test_a_missing_extra_is_named(
    module: str,
    words: list[str],
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    real: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else real(name))
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    assert cli.run(parser.parse_args([*words, "--device", "cpu"])) == 2
    assert f"needs {module}: pip install '.[{extra}]' in a checkout" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_file_that_cannot_be_written(option: str, capsys: pytest.CaptureFixture[str]):
    """It is found out before the work."""
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    assert cli.run(parser.parse_args(["decode", "--device", "cpu", option, "/nowhere/file.svg"])) == 2
    assert f"{option}: got '/nowhere/file.svg': No such file or directory" in capsys.readouterr().err


def test_peak_memory_sees_an_allocation():
    level = machine.reset_peak_memory()
    if level is None:
        pytest.skip("Linux does not let a process reset its high-water mark here")
    torch.ones(2**24)  # 64 MiB
    assert machine.peak_memory() - level >= 2**25
