"""The command that runs transformers' own tests, as far as it can be tested without them."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from scripts.transformers_own_tests import checkout, hub, outcomes, replacement
from scripts.transformers_own_tests.exceptions import LEFT_OUT, Exceptions
from scripts.transformers_own_tests.suites import SUITES

MESSAGE = "What is the Transformers library known for?"


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        (None, None),
        ("sdpa", "flashxla"),
        ("paged|sdpa", "paged|flashxla"),
        ("flash_attention_2", "flashxla"),
        ("eager", "eager"),
        ("paged|eager", "paged|eager"),
        ("flex_attention", "flex_attention"),
    ],
)
def test_replaced(requested: str | None, expected: str | None) -> None:
    """What is compared with eager attention must stay eager."""
    assert replacement.replaced(requested, "flashxla") == expected


def test_replacement(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = transformers.PreTrainedModel._check_and_adjust_attn_implementation
    monkeypatch.setattr(transformers.PreTrainedModel, "_check_and_adjust_attn_implementation", choose)
    replacement.replace("flashxla")
    model = make_model("llama")
    assert model.config._attn_implementation == "flashxla"  # transformers' default is sdpa
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("sdpa")
    assert model.config._attn_implementation == "flashxla"


def record(outcome: str, reason: str = "", flashxla: int = 0, sdpa: int = 0) -> dict[str, Any]:
    return {"outcome": outcome, "reason": reason, "calls": {"flashxla": flashxla, "sdpa": sdpa}}


@pytest.fixture
def table(tmp_path: Path) -> Exceptions:
    path = tmp_path / "table.toml"
    path.write_text(
        """
        left_out = [{tests = ["*::test_of_a_gpu"], reason = "a GPU"}]
        refused = [{tests = ["A::test_weights_*"], message = "output_attentions: got", reason = "weights"}]
        skipped = [{message = "requires (av|Timm)", reason = "a package"}]
        """,
        encoding="utf-8",
    )
    return Exceptions(path)


OUTCOMES = {
    "passed": (record("passed", flashxla=3), record("passed", sdpa=3), outcomes.PASSED),
    "passed with compiled sdpa": (record("passed", flashxla=3), record("passed"), outcomes.PASSED),
    "never calls attention": (record("passed"), record("passed"), outcomes.WITHOUT_ATTENTION),
    "passed in vain": (record("passed"), record("passed", sdpa=3), "passed without a call of flashxla"),
    "in vain, and sdpa fails": (
        record("passed"),
        record("failed", sdpa=3),
        "passed without a call of flashxla",
    ),
    "sdpa all the same": (record("passed", flashxla=1, sdpa=1), record("passed", sdpa=2), "called sdpa"),
    "failed": (record("failed", "wrong"), record("passed"), "failed"),
    "failed anyway": (record("failed", "wrong"), record("failed", "wrong"), outcomes.FAILS_ANYWAY),
    "skipped": (record("skipped", "test requires Timm"), record("skipped"), outcomes.NOT_RUN),
    "left out": (record("skipped", LEFT_OUT + "a GPU"), record("skipped"), outcomes.NOT_RUN),
    "skipped for a new reason": (
        record("skipped", "test requires X"),
        record("skipped"),
        "skipped, not in the table",
    ),
}


@pytest.mark.parametrize("case", OUTCOMES)
def test_outcomes(table: Exceptions, case: str) -> None:
    mine, baseline, expected = OUTCOMES[case]
    test = "tests/test_a.py::A::test_b"
    assert outcomes.outcomes({test: mine}, {test: baseline}, table)[test][0] == expected
    assert outcomes.problems({test: mine}, {test: baseline}, table) == (expected in outcomes.PROBLEMS)
    lines = "\n".join(outcomes.report("suite", {test: mine}, {test: baseline}, table))
    assert (test in lines) == (expected in (*outcomes.PROBLEMS, outcomes.FAILS_ANYWAY))


@pytest.mark.parametrize(
    ("mine", "expected"),
    [
        (record("failed", "ValueError: output_attentions: got True"), outcomes.REFUSED),
        (record("failed", "AssertionError"), "failed"),
        (record("passed", flashxla=1), "not refused"),
    ],
)
def test_refused(table: Exceptions, mine: dict[str, Any], expected: str) -> None:
    """A test that is expected to be refused must be, with that message."""
    test = "tests/test_a.py::A::test_weights_0"
    assert outcomes.outcomes({test: mine}, {}, table)[test][0] == expected


def test_the_table() -> None:
    table = Exceptions()
    assert (
        table.left_out("tests/generation/test_paged_attention.py::LlamaIntegrationTest::test_a") is not None
    )
    assert table.left_out("tests/models/llama/test_modeling_llama.py::LlamaModelTest::test_model") is None
    assert table.skipped("test requires CUDA") is not None
    assert table.skipped("Model is not a composite model.") is not None
    assert table.skipped("M with sliding window attention is not supported by this test") is not None
    assert table.skipped("something else") is None
    assert {"llama", "qwen3", "continuous_batching"} <= SUITES.keys()


@pytest.mark.parametrize("name", hub.MODELS)
def test_models_in_place_of_the_hub(name: str, tmp_path: Path) -> None:
    text = tmp_path / "text.py"
    text.write_text(MESSAGE, encoding="utf-8")
    hub.save(name, hub.words([text]), tmp_path / "model")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    chat = [{"role": "user", "content": MESSAGE}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    ids = inputs["input_ids"]
    # A block of 32 tokens, and not a second one, in words that the tokenizer knows.
    assert 32 <= ids.shape[1] < 64
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids[0]).replace(" ", "").endswith(MESSAGE.replace(" ", "") + "<|assistant|>")
    tokens = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    assert len(tokens) == 24
    assert len(hub.SPECIAL) <= tokens.min()
    assert len(torch.unique(tokens)) > 4  # another attention would show


def test_a_folder_without_tests(tmp_path: Path) -> None:
    with pytest.raises(
        SystemExit, match=r"checkout: got .*; accepted: a folder with transformers' tests, or a tag"
    ):
        checkout.folder_of(str(tmp_path))


def test_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers is that of the checkout, and nothing is fetched."""
    monkeypatch.setattr(checkout.os, "environ", {"PYTHONPATH": "other"})
    variables = types.SimpleNamespace(**checkout.environment(tmp_path, tmp_path / "packages"))
    assert variables.PYTHONPATH.split(":")[:2] == [str(tmp_path / "packages"), str(tmp_path / "src")]
    assert variables.HF_HUB_OFFLINE == "1"
