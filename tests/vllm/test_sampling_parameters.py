"""Penalties, masks of tokens, min-p and seeds: tokens equal to those of a sampler written apart, in NumPy and float64,
on the logits of Hugging Face transformers.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, RepetitionPenaltyLogitsProcessor
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.vllm import checkpoints
from tests.vllm.checkpoints import PROMPTS
from tests.vllm.engine import engine

COUNT = 16
# Prompts of which the greedy tokens repeat, so that penalties matter.
SHARED = [(3 * i) % 400 + 20 for i in range(48)]
LONGER = [[*SHARED, i, i + 7, 5 * i] for i in range(10, 16)]


class Reference:
    """The next token by vLLM's definitions of the parameters."""

    def __init__(self, path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.logits = functools.cache(self._logits)

    @torch.inference_mode()
    def _logits(self, ids: tuple[int, ...]) -> np.ndarray:
        return self.model(torch.tensor([ids])).logits[0, -1].double().numpy()

    def write(self, prompt: list[int], count: int, **wanted) -> list[int]:
        output: list[int] = []
        for _ in range(count):
            output.append(self.next(prompt, output, **wanted))
        return output

    def processed(self, prompt, output, wanted) -> np.ndarray:
        x = self.logits((*prompt, *output)).copy()
        if "allowed_token_ids" in wanted:
            others = set(range(len(x))) - set(wanted["allowed_token_ids"])
            x[list(others)] = -np.inf
        for word in wanted.get("bad_words", ()):
            tokens = [int(piece[1:]) for piece in word.split()]
            if output[len(output) - len(tokens) + 1 :] == tokens[:-1] and len(output) >= len(tokens) - 1:
                x[tokens[-1]] = -np.inf
        if len(output) < wanted.get("min_tokens", 0):
            x[wanted["stop_token_ids"]] = -np.inf
        for token, bias in wanted.get("logit_bias", {}).items():
            x[token] += bias
        scale = wanted.get("repetition_penalty", 1.0)
        for token in set(prompt) | set(output):
            x[token] = x[token] / scale if x[token] > 0 else x[token] * scale
        for token in set(output):
            x[token] -= wanted.get("frequency_penalty", 0.0) * output.count(token)
            x[token] -= wanted.get("presence_penalty", 0.0)
        return x

    def next(self, prompt, output, **wanted) -> int:
        x = self.processed(prompt, output, wanted)
        if not wanted.get("temperature"):
            return int(np.argmax(x))
        x = self.narrowed(x / wanted["temperature"], wanted)
        # Seeds: Gumbel noise by a key that is the seed's, folded with the token's place in the output.
        halves = np.array([wanted["seed"] >> 32, wanted["seed"] & 0xFFFFFFFF], np.uint32)
        key = jax.random.fold_in(jax.random.wrap_key_data(halves), len(output))
        noise = np.asarray(jax.random.gumbel(key, x.shape), np.float64)
        return int(np.argmax(x + noise))

    def narrowed(self, x, wanted) -> np.ndarray:
        probabilities = np.exp(x - x.max())
        probabilities /= probabilities.sum()
        keep = probabilities >= wanted.get("min_p", 0.0) * probabilities.max()
        x = np.where(keep, x, -np.inf)
        if "top_k" in wanted:
            x = np.where(x >= np.sort(x)[-wanted["top_k"]], x, -np.inf)
        if "top_p" in wanted:
            order = np.argsort(-x)
            mass = np.cumsum(np.exp(x[order] - x.max())) / np.exp(x - x.max()).sum()
            x[order[1 + np.searchsorted(mass, wanted["top_p"]) :]] = -np.inf
        return x


@pytest.fixture(scope="module")
def repeating(tmp_path_factory):
    """A checkpoint that repeats tokens unless penalties forbid it: with tied embeddings the last token is likely."""
    path = tmp_path_factory.mktemp("repeating")
    config = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, "initializer_range": 0.1}
    checkpoints.save(checkpoints.Family("llama", config), path)
    return path


@pytest.fixture(scope="module")
def reference(repeating):
    return Reference(repeating)


@pytest.fixture(scope="module", params=[True, False], ids=["async", "sync"])
def running(request, repeating):
    with engine(repeating, async_scheduling=request.param, max_logprobs=5) as running:
        yield running


def parameters(reference, prompt) -> list[dict]:
    """Parameters that change the tokens of the prompt, each and every one."""
    first, second, third, *_ = dict.fromkeys(reference.write(prompt, COUNT))
    return [
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.5},
        {"presence_penalty": 0.4},
        {"presence_penalty": -2.0},
        {"frequency_penalty": 0.4},
        {"min_tokens": 6, "stop_token_ids": [first, second], "ignore_eos": False},
        {"logit_bias": {77: 3.5, 78: 3.0}},
        {"logit_bias": {first: -50.0, third: 1.5}},
        {"allowed_token_ids": [50, 60, 61, 62, 499]},
        {"allowed_token_ids": [t for t in range(4, 512) if t != first]},  # more than the smallest program holds
        {"bad_words": [f"t{first}", f"t{third}"]},
        {"bad_words": [f"t{first} t{second}", f"t{second} t{third}"]},
        {"repetition_penalty": 1.1, "presence_penalty": -0.5, "frequency_penalty": 0.3, "logit_bias": {9: 3.0}},
        {"temperature": 0.8, "seed": 11},
        {"temperature": 1.0, "seed": 2**40 + 5, "min_p": 0.3},
        {"temperature": 1.5, "seed": 3, "min_p": 0.35, "top_k": 9, "repetition_penalty": 1.2},
        {"temperature": 1.2, "seed": 4, "top_p": 0.4, "allowed_token_ids": list(range(100, 300))},
    ]


NEEDED = ("temperature", "seed", "stop_token_ids", "ignore_eos")  # that others are asked with


def ask(running, asked, count=COUNT):
    """Tokens of (prompt, parameters), all in one batch."""
    params = [
        SamplingParams(**{"temperature": 0, "max_tokens": count, "ignore_eos": True} | wanted) for _, wanted in asked
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in asked]
    return [list(o.outputs[0].token_ids) for o in running.llm.generate(prompts, params, use_tqdm=False)]


def expect(reference, prompt, wanted, count=COUNT):
    """The reference's tokens, up to and with a stop token."""
    tokens = reference.write(prompt, count, **wanted)
    for stop in wanted.get("stop_token_ids", ()):
        at = [i for i, token in enumerate(tokens) if token == stop and i >= wanted.get("min_tokens", 0)]
        tokens = tokens[: at[0] + 1] if at else tokens
    return tokens


def test_the_reference_is_hfs(reference):
    """Of what Hugging Face defines in the same way."""
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    prompt, output = PROMPTS[2], [423, 107, 423, 9]
    ids = torch.tensor([[*prompt, *output]])
    raw = torch.tensor(reference.logits((*prompt, *output)))[None]
    penalised = RepetitionPenaltyLogitsProcessor(1.8)(ids, raw.clone())[0].numpy()
    np.testing.assert_allclose(reference.processed(prompt, output, {"repetition_penalty": 1.8}), penalised)
    for name, warper in (("min_p", MinPLogitsWarper(0.3)), ("top_k", TopKLogitsWarper(7)), ("top_p", TopPLogitsWarper(0.4))):
        value = {"min_p": 0.3, "top_k": 7, "top_p": 0.4}[name]
        kept = reference.narrowed(raw[0].numpy(), {name: value})
        np.testing.assert_array_equal(np.isfinite(kept), np.isfinite(warper(ids, raw.clone())[0].numpy()))


@pytest.mark.parametrize("which", [2, 4])
def test_each_parameter_alone(which, running, reference):
    prompt = PROMPTS[which]
    assert ask(running, [(prompt, {})]) == [reference.write(prompt, COUNT)]
    for wanted in parameters(reference, prompt):
        expected = expect(reference, prompt, wanted)
        assert expected != reference.write(prompt, COUNT), f"{wanted} changes nothing"
        for name in wanted.keys() - set(NEEDED):
            without = {other: value for other, value in wanted.items() if other != name}
            assert expected != expect(reference, prompt, without), f"{name} of {wanted} changes nothing"
        assert ask(running, [(prompt, wanted)]) == [expected], wanted


def test_all_in_one_batch_beside_requests_that_ask_for_nothing(running, reference):
    asked = [(PROMPTS[i % 6], wanted) for i, wanted in enumerate(parameters(reference, PROMPTS[2]))]
    asked = [pair for wanted in asked for pair in (wanted, (wanted[0], {}))]
    assert ask(running, asked) == [expect(reference, *pair) for pair in asked]
