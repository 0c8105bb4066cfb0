"""Sampling parameters, through the offline API."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.vllm import checkpoints
from tests.vllm.checkpoints import PROMPTS
from tests.vllm.engine import engine


@pytest.fixture(scope="module")
def running(checkpoint):
    with engine(checkpoint("llama"), max_logprobs=5) as running:
        yield running


@pytest.fixture(scope="module")
def reference(checkpoint):
    """Transformers' log probabilities at each place of some tokens."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype=torch.float32)

    @torch.inference_mode()
    def logprobs(ids):
        return torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)

    return logprobs


def expect_prompt_logprobs(prompt, output, expected, at_least=1):
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for i, top in enumerate(output.prompt_logprobs[1:]):
        assert prompt[i + 1] in top and len(top) >= at_least
        for token, logprob in top.items():
            assert logprob.logprob == pytest.approx(expected[i, token].item(), abs=1e-3)


def expect_logprobs(prompt, sample, expected, at_least):
    assert len(sample.logprobs) == len(sample.token_ids)
    for i, top in enumerate(sample.logprobs):
        assert sample.token_ids[i] in top and len(top) >= at_least
        for token, logprob in top.items():
            assert logprob.logprob == pytest.approx(expected[len(prompt) - 1 + i, token].item(), abs=1e-3)


def test_logprobs_are_hfs(running, reference):
    for prompt, output in zip(
        PROMPTS[2:4], running.generate(PROMPTS[2:4], 4, logprobs=3, prompt_logprobs=1), strict=True
    ):
        expected = reference([*prompt, *output.outputs[0].token_ids])
        expect_logprobs(prompt, output.outputs[0], expected, 3)
        expect_prompt_logprobs(prompt, output, expected)


@pytest.mark.parametrize("most", [-1, checkpoints.VOCABULARY + 100])
def test_logprobs_of_the_whole_vocabulary(most, checkpoint, reference):
    with engine(checkpoint("llama"), max_logprobs=most) as running:
        for count in (-1, 30):
            (output,) = running.generate(PROMPTS[2:3], 2, logprobs=count, prompt_logprobs=count)
            expected = reference([*PROMPTS[2], *output.outputs[0].token_ids])
            at_least = checkpoints.VOCABULARY if count == -1 else count
            expect_logprobs(PROMPTS[2], output.outputs[0], expected, at_least)
            expect_prompt_logprobs(PROMPTS[2], output, expected, at_least)


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_prompt_logprobs_beside_preemption(asynchronous, checkpoint, reference, hf_tokens):
    """Each request gets them once. A cache of 12 blocks of 16 for six sequences that grow to 5 blocks each."""
    prompts = [[(i * j) % 450 + 11 for j in range(30)] for i in range(1, 7)]
    options = {"num_gpu_blocks_override": 13, "max_model_len": 128, "max_num_batched_tokens": 24}
    with engine(checkpoint("llama"), async_scheduling=asynchronous, **options) as running:
        for _ in range(2):
            outputs = running.generate(prompts, 40, prompt_logprobs=2)
            tokens = [list(output.outputs[0].token_ids) for output in outputs]
            assert tokens == hf_tokens("llama", prompts, 40)
            for prompt, output in zip(prompts, outputs, strict=True):
                expect_prompt_logprobs(prompt, output, reference(prompt), 2)
        assert running.metric("num_preemptions") > 0


def test_stop_strings_and_tokens(running, hf_tokens):
    tokens = hf_tokens("llama")[3]
    (output,) = running.generate(PROMPTS[3:4], 12, stop=[f"t{tokens[5]}"])
    assert list(output.outputs[0].token_ids) == tokens[:6]
    assert output.outputs[0].finish_reason == "stop"
    (output,) = running.generate(PROMPTS[3:4], 12, stop_token_ids=[tokens[4]])
    assert list(output.outputs[0].token_ids) == tokens[:5]


def test_several_samples(running, hf_tokens):
    (output,) = running.generate(PROMPTS[2:3], 8, n=4, temperature=1.0)
    texts = {tuple(sample.token_ids) for sample in output.outputs}
    assert len(output.outputs) == 4
    assert len(texts) > 1
    (output,) = running.generate(PROMPTS[2:3], 12, n=3, temperature=1.0, top_k=1)
    assert [list(sample.token_ids) for sample in output.outputs] == [hf_tokens("llama")[2]] * 3


def test_temperature_changes_the_distribution(running):
    """At temperature 1 tokens come with the frequencies of the logits: the most likely one of a few hundred draws."""
    (output,) = running.generate(PROMPTS[:1], 1, n=256, temperature=1.0, logprobs=5)
    best = max(output.outputs[0].logprobs[0].items(), key=lambda item: item[1].logprob)
    probability = math.exp(best[1].logprob)
    drawn = sum(sample.token_ids[0] == best[0] for sample in output.outputs) / 256
    assert abs(drawn - probability) < 5 * math.sqrt(probability * (1 - probability) / 256)


def test_structured_output(running):
    from vllm.sampling_params import StructuredOutputsParams

    (output,) = running.generate(
        PROMPTS[2:3],
        8,
        structured_outputs=StructuredOutputsParams(choice=["t17 t18", "t21"]),
        ignore_eos=False,
    )
    assert output.outputs[0].text.strip() in ("t17 t18", "t21")


def test_structured_outputs_of_several_requests(running):
    """Each request keeps to its own grammar, whatever the order of their names."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    texts = [f"t{20 + i}t{35 - i}" for i in range(16)]
    params = [
        SamplingParams(temperature=0, max_tokens=8, structured_outputs=StructuredOutputsParams(choice=[text]))
        for text in texts
    ]
    outputs = running.llm.generate(
        [{"prompt_token_ids": PROMPTS[i % 6]} for i in range(16)], params, use_tqdm=False
    )
    assert [output.outputs[0].text.replace(" ", "") for output in outputs] == texts


def test_logprobs_of_the_sampled_token_alone(running):
    """logprobs=0, which is what chat's logprobs=true without top_logprobs means."""
    (output,) = running.generate(PROMPTS[2:3], 3, logprobs=0)
    assert [set(top) for top in output.outputs[0].logprobs] == [{t} for t in output.outputs[0].token_ids]
