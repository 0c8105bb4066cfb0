"""The bench in JAX: without PyTorch, and beside it when asked."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("rich")

from flashxla.bench import cli, jax_topics, runner
from flashxla.bench.frameworks import sample_loop
from flashxla.bench.topic import Options, Peer, Run

WITHOUT_TORCH = """
import sys
for name in ("torch", "torch_xla"): sys.modules[name] = None
from flashxla import cli
sys.exit(cli.main(["bench", *sys.argv[1:]]))
"""


def without_torch(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH, *words, "--device", "cpu"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_everything_runs_without_torch() -> None:
    done = without_torch("--quick", "--rounds", "1", "--peers", "--json", "-")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert set(document["results"]) == set(cli.IN_JAX)
    assert "--frontend jax" in document["command"]
    for name, rows in document["results"].items():
        topic = jax_topics.TOPICS[name]
        contenders = {topic.ours.name, *(peer.name for peer in topic.peers)}
        for case in topic.cases["quick"]:
            for dtype in ("float32", "bfloat16"):
                found = {r["contender"] for r in rows if (r["case"], r["dtype"]) == (case.name, dtype)}
                assert found == contenders
        assert all(row["seconds"] > 0 and row["of_ceiling"] > 0 for row in rows)


@pytest.mark.parametrize("name", ["backward", "strategies"])
def test_what_needs_torch_names_all_that_is_missing(name: str) -> None:
    done = without_torch(name)
    assert done.returncode == 2
    missing, extras = ("torch", "torch") if name == "backward" else ("torch, torch_xla", "torch,torch-xla")
    assert done.stderr.splitlines()[-1] == (
        f"flashxla bench: needs {missing}: pip install '.[{extras}]' in a checkout of flashxla"
    )


def test_missing_packages_are_named_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real: Callable[..., Any] = importlib.util.find_spec
    gone = ("rich", "matplotlib", "torch")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in gone else real(name))
    assert run("decode", "--plot", "x.svg") == 2
    assert "needs rich, matplotlib: pip install '.[bench]' in a checkout" in capsys.readouterr().err
    assert run("backward", "--plot", "x.svg") == 2
    assert "needs rich, matplotlib, torch: pip install '.[bench,torch]'" in capsys.readouterr().err


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args([*words, "--device", "cpu"]))


def test_a_topic_that_jax_has_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("backward", "--frontend", "jax") == 2
    assert "--frontend jax: got backward; accepted: prefill, decode, kv_write" in capsys.readouterr().err


@pytest.mark.parametrize("name", cli.IN_JAX)
def test_wrong_results_stop_it(name: str) -> None:
    topic = jax_topics.TOPICS[name]

    def wrong(problem: Any) -> Run:
        good = topic.ours.build(problem)
        return Run(good.call, lambda result: [x + 1 for x in good.results(result)])

    options = Options(dtypes=("float32",), rounds=1, quick=True, frontend="jax")
    with pytest.raises(RuntimeError, match=f"{name} .* and flashxla disagree"):
        runner.run(dataclasses.replace(topic, ours=Peer("flashxla", wrong)), options)


def test_a_sample_has_as_many_calls_as_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def call() -> None:
        nonlocal now
        now += 0.25

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert sample_loop(call, 100.0) == 0.25
    assert now >= 0.25 + 100.0  # a call to warm up, and as many as last so long
