"""Generation equals transformers' own, through every front end and for every kind of model."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest

from flashxla.generate import attention
from tests.generate import checkpoints
from tests.generate.command_line import run_error, run_json

# Prompts of different lengths, the last longer than a step; one shape, so that one program is compiled.
PROMPTS = ("A", "The with statement", "When an exception is raised in a function, Python looks for a handler")
# TorchTPU's environment has no PyTorch/XLA (make test-torchtpu).
OF_TODAY = importlib.util.find_spec("torch_tpu") is not None
FRONTENDS = ("torchtpu", "torchax") if OF_TODAY else ("torch", "lazy", "openxla")
OF_XLA = [name for name in FRONTENDS if name != "torch"]
ONE_SHAPE = ("--max-seqs", "24", "--max-batch-tokens", "24")


def check(report: dict, largest: float = 1e-3) -> None:
    for comparison in report["verify"]:
        assert comparison["mismatch"] is None
        assert comparison["tokens"] > 0
        assert comparison["largest_difference"] < largest


@pytest.mark.parametrize("name", FRONTENDS)
def test_default_model(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name in ("lazy", "openxla"):
        pytest.importorskip("torch_xla")
    # 120 tokens of cache: the three sequences do not fit together.
    sizes = ("--num-blocks", "15", "--block-size", "8", "--max-seqs", "4", "--max-batch-tokens", "24")
    options = ("--frontend", name, "--verify", "--max-new-tokens", "24", *sizes)
    code, report = run_json(capsys, *options, "--prompt", *PROMPTS)
    assert code == 0
    check(report)
    assert report["preemptions"] > 0
    assert report["token_buckets"] == [4, 24]
    # What is reported is what torch_xla counted: one program a shape, none beside.
    assert report["compiled_programs"] == (None if name == "torch" else 2)


@pytest.mark.parametrize("kind", checkpoints.CONFIGS)
@pytest.mark.parametrize("name", FRONTENDS)
def test_kinds_of_models(name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if name in ("lazy", "openxla"):
        pytest.importorskip("torch_xla")
    folder = str(checkpoints.save(kind, tmp_path))
    options = ("--model", folder, "--frontend", name, "--verify", "--max-new-tokens", "12", "--ignore-eos")
    code, report = run_json(capsys, *options, *ONE_SHAPE, "--prompt", *PROMPTS)
    assert code == 0
    check(report)
    assert [comparison["tokens"] for comparison in report["verify"]] == [12, 12, 12]
    assert report["compiled_programs"] == (None if name == "torch" else 1)


@pytest.mark.parametrize("name", OF_XLA)
def test_models_that_are_no_program_for_xla_are_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """JetMoe reads on the CPU how many tokens each expert has; under lazy tensors that ended the process."""
    if not OF_TODAY:
        pytest.importorskip("torch_xla")
    folder = str(checkpoints.save("jetmoe", tmp_path))
    options = ("--model", folder, "--max-new-tokens", "2", "--ignore-eos", *ONE_SHAPE, "--prompt", "A")
    message = run_error(capsys, *options, "--frontend", name)
    assert message.startswith(f"--frontend: got {name} with JetMoeForCausalLM, which decides by values")
    assert message.endswith("accepted: --frontend torch with this model")
    code, report = run_json(capsys, *options, "--frontend", "torch", "--verify")
    assert code == 0
    check(report)


def test_a_difference_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without its sliding window a model must fail."""
    folder = str(checkpoints.save("mistral", tmp_path))

    def without_window(*args: object, sliding_window: int | None = None, **kwargs: object) -> object:
        return attention.own_cache.attention(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setitem(attention.AttentionInterface._global_mapping, attention.ATTENTION, without_window)
    options = ("--model", folder, "--frontend", "torch", "--verify", "--max-new-tokens", "16", "--ignore-eos")
    code, report = run_json(capsys, *options, *ONE_SHAPE, "--prompt", *PROMPTS)
    assert code == 1
    comparison = report["verify"][2]
    assert comparison["largest_difference"] > 0.1 or math.isnan(comparison["largest_difference"])
    assert "the reference has" in comparison["mismatch"]


def test_sampling_does_not_depend_on_the_batch(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--frontend", "torch", "--temperature", "0.8", "--top-p", "0.9", "--max-new-tokens", "20")
    _, together = run_json(capsys, *options, "--prompt", *PROMPTS)
    small = ("--num-blocks", "15", "--block-size", "8", "--max-seqs", "4", "--max-batch-tokens", "8")
    _, preempted = run_json(capsys, *options, *small, "--prompt", *PROMPTS)
    assert preempted["preemptions"] > 0
    assert [p["tokens"] for p in together["prompts"]] == [p["tokens"] for p in preempted["prompts"]]
    _, other = run_json(capsys, *options, "--seed", "1", "--prompt", *PROMPTS)
    assert [p["tokens"] for p in together["prompts"]] != [p["tokens"] for p in other["prompts"]]
