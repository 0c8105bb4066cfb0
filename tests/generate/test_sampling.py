"""Samples follow the options, and only the seed and the sequence decide them."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel

from flashxla.generate import DEFAULT_MODEL
from flashxla.generate.errors import GenerateError
from flashxla.generate.options import SamplingOptions
from flashxla.generate.sampling import Sampler

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])


@cache
def default_model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(DEFAULT_MODEL)


def draw(options: SamplingOptions, count: int = 400, index: int = 0) -> list[int]:
    sampler = Sampler(options, index)
    return [sampler.choose(LOGITS) for _ in range(count)]


def distribution(logits: np.ndarray, options: SamplingOptions) -> np.ndarray:
    """The probabilities that the options ask for, of logits that all differ."""
    scores = logits / options.temperature
    likeliest_first = np.argsort(-scores)
    kept = likeliest_first[: options.top_k or None]
    probabilities = np.zeros(len(scores))
    probabilities[kept] = np.exp(scores[kept] - scores.max())
    probabilities /= probabilities.sum()
    before = np.cumsum(probabilities[kept]) - probabilities[kept]
    # Which side of top_p a sum is on must not be a matter of rounding.
    assume(options.top_p == 1 or np.abs(before - options.top_p).min() > 1e-9)
    probabilities[kept[before >= options.top_p]] = 0
    return probabilities / probabilities.sum()


@given(
    order=st.permutations(range(10)),
    # Steps between the logits, from nearly equal to far apart.
    step=st.floats(0.01, 5),
    options=st.builds(
        SamplingOptions,
        temperature=st.floats(0.1, 10),
        top_k=st.integers(0, 12),
        top_p=st.floats(0.01, 0.99) | st.just(1.0),
    ),
)
def test_probabilities_are_what_the_options_ask_for(
    order: list[int], step: float, options: SamplingOptions
) -> None:
    logits = torch.tensor(order) * torch.tensor(step, dtype=torch.float32)
    got = Sampler(options, 0).probabilities(logits)
    expected = distribution(logits.double().numpy(), options)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("top_k", [0, 1, 7, 1000])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 1.0])
def test_probabilities_are_those_of_transformers(top_k: int, top_p: float) -> None:
    options = SamplingOptions(temperature=0.7, top_k=top_k, top_p=top_p)
    output = default_model().generate(
        torch.tensor([list(b"The with")]),
        do_sample=True,
        temperature=options.temperature,
        top_k=top_k,
        top_p=top_p,
        max_new_tokens=1,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
    )
    got = Sampler(options, 0).probabilities(output.logits[0][0])
    assert torch.allclose(got.float(), output.scores[0][0].softmax(0), rtol=1e-4)


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e308])
def test_any_temperature_will_do(temperature: float) -> None:
    probabilities = Sampler(SamplingOptions(temperature=temperature), 0).probabilities(
        torch.tensor([3e38, -3e38, 0.0]) if temperature < 1 else LOGITS
    )
    expected = [1, 0, 0] if temperature < 1 else [0.2] * 5
    assert torch.allclose(probabilities, torch.tensor(expected, dtype=torch.float64))


def test_greedy_takes_the_largest_logit() -> None:
    assert set(draw(SamplingOptions())) == {1}
    # The first of equals, and what makes a difference in float32 does so here. top_k and top_p change nothing.
    sampler = Sampler(SamplingOptions(top_k=2, top_p=0.5), 0)
    for logits, token in (([0.0, 1e-45, 1e-45], 1), ([3e38, -3e38, 3.1e38], 2)):
        assert sampler.choose(torch.tensor(logits)) == token


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
