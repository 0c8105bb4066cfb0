"""docs/benchmarks.md is what its JSON files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import document, figures, llama, plan, prose_cpu, prose_gpu, shape_lists, tables, ways
from benchmarks.figures import Run


def test_the_page_is_up_to_date():
    assert document.PAGE.read_text() == document.text(), "run python -m benchmarks.document"


def test_a_table_that_another_page_quotes():
    page = document.PAGE.with_name("pytorch-xla-gpu.md").read_text()
    assert tables.steps(Run("h200-step")) in page


def test_the_table_of_gradients():
    page = document.PAGE.with_name("training.md").read_text()
    runs = Run("cpu-backward-float32"), Run("cpu-backward-bfloat16")
    assert tables.attention(*runs) in page
    (processor,) = {run.content["machine"]["cpu"] for run in runs}
    assert processor in page


def test_the_tables_of_gradients_on_a_gpu():
    page = document.PAGE.with_name("training.md").read_text()
    assert tables.gradients(Run("h200-backward")) in page
    steps = json.loads((figures.FOLDER / "h200-train-step.json").read_text())
    assert steps["device"] in page
    assert tables.train_steps(steps["cases"]) in page


def test_the_tables_of_the_pytorch_of_today(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    page = " ".join(document.PAGE.with_name("torchtpu.md").read_text().split())
    if figures.is_measured("h200-train-llama"):
        content = json.loads((figures.FOLDER / "h200-train-llama.json").read_text())
        assert " ".join(tables.train_llama(content["results"]).split()) in page
    names = (ways.OURS.name, *llama.OF_TODAY)
    rows = [
        {
            "case": "batch 16, 2048 keys",
            "contender": name,
            "us": 5000.0 * n,
            "host_us": 500.0,
            "compile_seconds": 2.0,
            "eager_us": {"a": 30.0, "b": 60.0},
        }
        for n, name in enumerate(names, 1)
    ]
    content = {
        "results": {"step": rows},
        "versions": {"torch": "2.11.0", "jax": "1"},
        "device": {"name": "GPU"},
    }
    for file in figures.FOLDER.glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / f"{prose_gpu.STEPS_OF_TODAY}.json").write_text(json.dumps(content))
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    cells = [
        "16",
        "5.00 ms",
        "10.00 ms",
        "15.00 ms",
        "2.00",
        "3.00",
        "0.50, 0.50, 0.50 ms",
        "2.0, 2.0, 2.0 s",
    ]
    assert f"| {' | '.join([*cells, '30, 60; 30, 60 us'])} |" in document.text()


def test_figures_that_the_readme_quotes():
    readme = " ".join((document.PAGE.parents[1] / "README.md").read_text().split())
    copying = [row["seconds"] for row in Run("cpu-strategies").where(bytes=2 * 2**30, pointer_stays=False)]
    assert f"copy the cache take {min(copying):.1f} to {max(copying):.0f} s at 2 GiB" in readme
    jax, openxla = (
        Run("h200-step").row(case="batch 16, 2048 keys", contender=name)["us"] / 1e3
        for name in (ways.OURS.name, llama.OPENXLA)
    )
    assert f"takes {openxla:.1f} ms there under openxla at batch 16, {openxla / jax:.2f} times" in readme


def changed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """All files as they are, but for the rows of one."""
    for file in figures.FOLDER.glob("*.json"):
        content = json.loads(file.read_text())
        if file.stem == name:
            for rows in content["results"].values():
                for row in rows:
                    change(row)
        (tmp_path / file.name).write_text(json.dumps(content))
    monkeypatch.setattr(figures, "FOLDER", tmp_path)


def test_figures_in_sentences_follow_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def slower(row: dict[str, Any]) -> None:
        if row["strategy"] == "aliased op" and row["mode"] == "lazy":
            row["seconds"] *= 1.01

    changed("cpu-strategies", tmp_path, monkeypatch, slower)
    assert prose_cpu.values()["aliased_ms"] == "0.290 to 0.297"


def test_a_statement_that_the_files_contradict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def worse(row: dict[str, Any]) -> None:
        if row["contender"] == plan.SHARED:
            row["us"] *= 2

    changed("h200-plan", tmp_path, monkeypatch, worse)
    with pytest.raises(ValueError, match="no longer say: The shared plan pays"):
        prose_gpu.values()


def test_a_name_that_the_page_does_not_use(monkeypatch: pytest.MonkeyPatch):
    values = prose_gpu.values()
    monkeypatch.setattr(prose_gpu, "values", lambda: {**values, "forgotten": "1"})
    with pytest.raises(ValueError, match="does not use \\['forgotten'\\]"):
        document.text()


def test_the_files_have_the_cases_that_are_measured():
    run = Run("h200-plan")
    assert run.names("case") == [shape.name for shape in shape_lists.PLAN]
    assert run.names("contender") == [plan.SHARED, plan.EACH]


def test_numbers_for_people():
    found = [figures.number(value) for value in (0.0123, 1.6, 28.04, 153.4, 1014.2, 1000)]
    assert found == ["0.0123", "1.60", "28.0", "153", "1014", "1000"]
    assert [figures.time(value) for value in (1.6, 0.0405, 2e-6)] == ["1.60 s", "40.5 ms", "2.00 us"]
    assert figures.between([0.47, 0.82], ".0%") == "47 to 82%"
    assert figures.between([1.61, 1.62], ".1f") == "1.6"
