"""Samples follow the options, and only the seed and the sequence decide them."""

from __future__ import annotations

import pytest
import torch

from flashxla.generate.errors import GenerateError
from flashxla.generate.options import SamplingOptions
from flashxla.generate.sampling import Sampler

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])


def draw(options: SamplingOptions, count: int = 400, index: int = 0) -> list[int]:
    sampler = Sampler(options, index)
    return [sampler.choose(LOGITS) for _ in range(count)]


def test_greedy_takes_the_largest_logit() -> None:
    assert set(draw(SamplingOptions())) == {1}


def test_frequencies_follow_the_softmax() -> None:
    tokens = torch.tensor(draw(SamplingOptions(temperature=2.0), 8000))
    frequencies = torch.bincount(tokens, minlength=5) / len(tokens)
    assert torch.allclose(frequencies, (LOGITS / 2).softmax(0), atol=0.03)


def test_top_k_keeps_the_k_likeliest() -> None:
    assert set(draw(SamplingOptions(temperature=5.0, top_k=2))) == {1, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    # The probabilities in falling order: 0.636, 0.234, 0.086, 0.032, 0.012.
    assert set(draw(SamplingOptions(temperature=1.0, top_p=0.6))) == {1}
    assert set(draw(SamplingOptions(temperature=1.0, top_p=0.7))) == {1, 3}
    assert set(draw(SamplingOptions(temperature=1.0, top_p=0.9))) == {1, 3, 2}


def test_seed_and_sequence_decide() -> None:
    options = SamplingOptions(temperature=1.0, seed=7)
    assert draw(options) == draw(options)
    assert draw(options) != draw(SamplingOptions(temperature=1.0, seed=8))
    assert draw(options, index=0) != draw(options, index=1)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
    ],
)
def test_wrong_options_are_named(option: str, value: float) -> None:
    with pytest.raises(GenerateError, match=f"--{option.replace('_', '-')}: got {value}; accepted"):
        SamplingOptions(**{option: value})
