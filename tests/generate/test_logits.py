"""NaN and infinite logits end generation with an error that says where, in place of tokens."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from flashxla.generate.batch import StepInputs
from flashxla.generate.checkpoint import Checkpoint
from flashxla.generate.engine import Engine
from flashxla.generate.errors import GenerateError
from flashxla.generate.options import SamplingOptions
from flashxla.generate.scheduler import Limits
from flashxla.generate.verify import compare
from tests.generate import checkpoints
from tests.generate.command_line import run_error
from tests.generate.fake_runner import FakeRunner

LIMITS = Limits(num_blocks=64, block_size=4, max_batch_tokens=16, max_seqs=4, max_length=40)


class BrokenRunner(FakeRunner):
    """One logit of the second sequence is wrong from the third step on."""

    value = math.nan
    steps = 0

    def run(self, inputs: StepInputs) -> torch.Tensor:
        logits = super().run(inputs)
        self.steps += 1
        if self.steps >= 3:
            logits[1, 5] = self.value
        return logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_generation_ends_at_the_token(value: float, temperature: float) -> None:
    runner = BrokenRunner(LIMITS)
    runner.value = value
    tokens = Engine(runner, LIMITS, frozenset()).generate(
        [[1, 2], [3, 4]], 10, SamplingOptions(temperature=temperature)
    )
    seen = []
    with pytest.raises(GenerateError, match="got NaN or infinite logits for token 3 of prompt 2; accepted"):
        for token in tokens:
            seen.append(token.index)
    assert seen.count(1) == 2


def test_damaged_weights_are_found_and_what_came_before_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoints.copy_default(tmp_path / "checkpoint")
    checkpoints.edit_tensors(folder, lambda tensors: tensors["model.norm.weight"].fill_(math.nan))
    path = tmp_path / "out.json"
    options = ("--frontend", "torch", "--model", str(folder), "--prompt", "a", "--json", str(path))
    message = run_error(capsys, *options)
    assert message.startswith(
        "--model: got NaN or infinite logits for token 1 of prompt 1; accepted: finite ones"
    )
    assert "NaN or infinite logits" in json.loads(path.read_text())["interrupted"]


def test_the_reference_of_verify_is_no_exception(tmp_path: Path) -> None:
    folder = checkpoints.copy_default(tmp_path)
    checkpoints.edit_tensors(folder, lambda tensors: tensors["model.norm.weight"].fill_(math.inf))
    reference, _ = Checkpoint(folder, torch.float32).load_model("eager", "eager")
    comparison = compare(reference, 0, [97, 98], [0], [torch.zeros(259)], frozenset())
    assert comparison.mismatch == "token 1: the reference has NaN or infinite logits"
