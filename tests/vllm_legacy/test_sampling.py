"""Sampling, beside greedy tokens; and what the runner's sampler cannot do."""

import math

import pytest

from tests.vllm.checkpoints import PROMPTS
from tests.vllm_legacy.engine import engine


@pytest.fixture(scope="module")
def running(checkpoint):
    with engine(checkpoint("llama"), max_logprobs=5) as running:
        yield running


def test_temperature_and_several_choices(running, hf_tokens):
    (output,) = running.generate([PROMPTS[2]], 6, temperature=1.0, n=6)
    assert len({tuple(choice.token_ids) for choice in output.outputs}) > 1
    (output,) = running.generate([PROMPTS[2]], 6, temperature=1.0, n=3, top_k=1)
    assert [list(choice.token_ids) for choice in output.outputs] == [hf_tokens("llama")[2][:6]] * 3


def test_logprobs(running):
    (output,) = running.generate([PROMPTS[2]], 3, logprobs=4)
    for token, top in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
        assert top[token].logprob == max(entry.logprob for entry in top.values())
        assert len(top) >= 4
        assert sum(math.exp(entry.logprob) for entry in top.values()) <= 1


def test_stop_tokens(running, hf_tokens):
    tokens = hf_tokens("llama")[3]
    (output,) = running.generate([PROMPTS[3]], 12, stop_token_ids=[tokens[5]])
    assert list(output.outputs[0].token_ids) == tokens[:6]


def test_structured_output(running):
    from vllm.sampling_params import StructuredOutputsParams

    choices = ["t17", "t21"]
    asked = StructuredOutputsParams(choice=choices)
    outputs = running.generate([PROMPTS[2], PROMPTS[3]], 8, ignore_eos=False, structured_outputs=asked)
    assert all(output.outputs[0].text.strip() in choices for output in outputs)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 1.0),
        ("frequency_penalty", 1.0),
        ("repetition_penalty", 1.5),
        ("min_tokens", 2),
        ("logit_bias", {7: 1.0}),
        ("allowed_token_ids", [7]),
        ("bad_words", ["t7"]),
        ("prompt_logprobs", 1),
        ("seed", 3),
    ],
)
def test_parameters_that_would_be_ignored_are_refused(name, value, running):
    with pytest.raises(ValueError, match=f"flashxla-vllm-legacy does not support {name}="):
        running.generate([PROMPTS[0]], 4, **{"temperature": 1.0, name: value})
