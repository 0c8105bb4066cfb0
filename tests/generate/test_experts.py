"""Mixtures of experts with fixed shapes equal transformers' own, for few tokens and for many."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from flashxla.generate import experts
from tests.generate import checkpoints
from tests.generate.command_line import run_json

KINDS = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_they_equal_transformers_eager_experts(
    kind: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(checkpoints.CONFIGS[kind]())
    module = model.model.layers[1].mlp.experts
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    hidden = torch.randn(tokens, model.config.hidden_size)
    routing = torch.randn(tokens, module.num_experts).softmax(-1)
    weights, index = routing.topk(2, dim=-1)
    copies = []
    monkeypatch.setattr(experts, "batched_mm_experts_forward", _recorded(copies))

    with torch.no_grad():
        model.set_experts_implementation("eager")
        expected = module(hidden, index, weights)
        model.set_experts_implementation(experts.EXPERTS)
        actual = module(hidden, index, weights)

    assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-4)
    assert actual.abs().max() > 0.1
    # An expert's weights are never copied for more tokens than there are experts.
    assert copies == ([2] if tokens == 1 else [])


def _recorded(copies: list[int]) -> object:
    forward = experts.batched_mm_experts_forward

    def record(module: object, hidden: object, index: torch.Tensor, weights: object) -> object:
        copies.append(index.numel())
        return forward(module, hidden, index, weights)

    return record


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_for_few_tokens_and_one_for_many(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch_xla")
    folder = str(checkpoints.save(kind, tmp_path))
    sizes = ("--max-seqs", "1", "--max-batch-tokens", "24")
    options = ("--model", folder, "--frontend", "lazy", "--verify", "--max-new-tokens", "8", "--ignore-eos")
    code, report = run_json(capsys, *options, *sizes, "--prompt", "A list is", "The with statement")
    assert code == 0
    assert all(c["mismatch"] is None and c["largest_difference"] < 1e-3 for c in report["verify"])
    assert report["token_buckets"] == [1, 24]
    assert report["compiled_programs"] == 2


def test_experts_are_chosen_for_xla_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("called")

    monkeypatch.setitem(experts.ALL_EXPERTS_FUNCTIONS._global_mapping, experts.EXPERTS, refuse)
    options = (
        "--model",
        str(checkpoints.save("mixtral", tmp_path)),
        "--max-new-tokens",
        "1",
        "--prompt",
        "a",
    )
    code, _ = run_json(capsys, *options, "--frontend", "torch", "--verify")
    assert code == 0
