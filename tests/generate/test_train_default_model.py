"""The default model's training: with every attention the same losses, on documents that do not see each other."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import flashxla.transformers
from flashxla.generate import DEFAULT_MODEL

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "train_default_model.py"
CURVE = ROOT / "docs" / "benchmarks" / "default-model-training.json"
# The files of scripts are modules to the script.
sys.path.insert(0, str(SCRIPT.parent))
from default_model import curve, data, training  # noqa: E402

SMALL = training.Options(
    steps=4, batch=2, learning_rate=1e-2, seed=0, report=4, validate=4, validation_windows=2
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def text() -> data.Data:
    return data.load()


def committed(attention: str) -> Any:
    flashxla.transformers.enable()
    return AutoModelForCausalLM.from_pretrained(
        DEFAULT_MODEL, attn_implementation=attention, dtype=torch.float32
    ).eval()


def test_the_same_losses(text: data.Data) -> None:
    ours, *others = training.train(text, training.ATTENTIONS, SMALL)
    assert ours.losses[-1] < ours.losses[0] - 1
    for other in others:
        assert ours.losses == pytest.approx(other.losses, abs=1e-3), other.attention
        assert ours.validation == [(4, pytest.approx(other.validation[0][1], abs=1e-3))], other.attention


@pytest.mark.parametrize("attention", training.ATTENTIONS)
def test_documents_do_not_see_each_other(text: data.Data, attention: str) -> None:
    """A window's loss is that of its documents, each alone."""
    model = committed(attention)
    batch = next(
        b for b in data.held_out(text, 1) if (b.tokens == data.BOS).sum() >= 3 and b.tokens[0, 0] != data.BOS
    )
    begins = [0, *(batch.tokens[0] == data.BOS).nonzero().flatten().tolist()]
    lengths = [end - begin for begin, end in zip(begins, [*begins[1:], batch.tokens.shape[1]], strict=True)]
    alone = [data.Batch(*parts) for parts in zip(*(x.split(lengths, dim=1) for x in batch), strict=True)]
    with torch.no_grad():
        together, count = training.loss_of(model, batch)
        losses = [training.loss_of(model, part) for part in alone]
    assert together.item() == pytest.approx(sum(loss.item() for loss, _ in losses), rel=1e-5)
    assert count == sum(targets for _, targets in losses)
    # If they saw each other, it would be another one.
    seen = batch._replace(positions=torch.arange(data.CONTEXT)[None])
    with torch.no_grad():
        assert training.loss_of(model, seen)[0].item() != pytest.approx(together.item(), rel=1e-3)


def test_windows(text: data.Data) -> None:
    tokens = [7, 8, data.EOS, data.BOS, 9, data.EOS, data.BOS]
    batch = data.packed(torch.tensor([tokens]))
    assert batch.tokens.tolist() == [tokens[:-1]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 2]]
    none = data.NO_TARGET
    assert batch.targets.tolist() == [[8, data.EOS, none, 9, data.EOS, none]]
    held_out = torch.cat([b.tokens.flatten() for b in data.held_out(text, 3)])
    assert held_out.equal(text.validation[: held_out.numel()])
    assert text.validation.numel() - held_out.numel() <= data.CONTEXT


def test_a_seed_gives_the_same_bits(text: data.Data) -> None:
    (first,), (second,) = (training.train(text, ["flashxla"], SMALL) for _ in range(2))
    assert first.losses == second.losses
    for (name, a), b in zip(first.model.named_parameters(), second.model.parameters(), strict=True):
        assert a.equal(b), name


def test_the_script(tmp_path: Path) -> None:
    options = [
        "--steps",
        "2",
        "--batch",
        "1",
        "--validation-windows",
        "1",
        "--attention",
        "flashxla",
        "eager",
    ]
    files = {"--out": tmp_path / "model", "--curve": tmp_path / "curve.json"}
    pytest.importorskip("matplotlib")
    files["--plot"] = tmp_path / "curve.svg"
    options += [str(word) for option in files.items() for word in option]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(files["--curve"].read_text())
    assert curve.table(found) in done.stdout
    assert [row["attention"] for row in found["results"]["training"]] == ["flashxla", "eager"]
    assert "</svg>" in files["--plot"].read_text()
    model = AutoModelForCausalLM.from_pretrained(files["--out"])
    assert model.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(files["--out"])
    assert tokenizer("A").input_ids == [data.BOS, ord("A")]
    assert "2 steps of 1 x 512 tokens" in (files["--out"] / "README.md").read_text()


def test_the_page_says_what_was_measured() -> None:
    page = (ROOT / "docs" / "training.md").read_text()
    found = json.loads(CURVE.read_text())
    assert curve.table(found) in page
    assert found["command"] in page
    assert found["machine"]["cpu"] in page
    ours, *others = found["results"]["training"]
    assert ours["attention"] == "flashxla"
    assert all(row["seconds"] > ours["seconds"] for row in others)
    assert f"eager's is {curve.distance(*others):.3f} from sdpa's" in page


def test_the_loss_of_the_card(text: data.Data) -> None:
    card = (DEFAULT_MODEL / "README.md").read_text()
    if f"{text.bytes:,} bytes" not in card:
        pytest.skip("this Python comes with another text")
    (loss,) = re.findall(r"held-out documents\): ([\d.]+) nats", card)
    measured = training.mean_loss(committed("flashxla"), data.held_out(text, 4))
    assert measured == pytest.approx(float(loss), abs=6e-4)
