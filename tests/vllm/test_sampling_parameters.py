"""Penalties, masks of tokens, min-p and seeds: tokens equal to those of a sampler written apart, in NumPy and float64,
on the logits of Hugging Face transformers.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flashxla_vllm import sampling, sampling_program, step_inputs
from jax.sharding import Mesh
from transformers import AutoModelForCausalLM, RepetitionPenaltyLogitsProcessor
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

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
        torch.set_num_threads(1)  # JAX has the others
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
        {
            "allowed_token_ids": [t for t in range(4, 512) if t != first]
        },  # more than the smallest program holds
        {"bad_words": [f"t{first}", f"t{third}"]},
        {"bad_words": [f"t{first} t{second}", f"t{second} t{third}"]},
        {
            "repetition_penalty": 1.1,
            "presence_penalty": -0.5,
            "frequency_penalty": 0.3,
            "logit_bias": {9: 3.0},
        },
        {"temperature": 0.8, "seed": 11},
        {"temperature": 1.0, "seed": 2**40 + 5, "min_p": 0.3},
        {"temperature": 1.5, "seed": 3, "min_p": 0.4, "top_k": 9, "repetition_penalty": 1.2},
        {"temperature": 1.2, "seed": 4, "top_p": 0.4, "allowed_token_ids": list(range(100, 300))},
    ]


NEEDED = ("temperature", "seed", "stop_token_ids", "ignore_eos")  # that others are asked with


def ask(running, asked, count=COUNT):
    """Tokens of (prompt, parameters), all in one batch."""
    params = [
        SamplingParams(**{"temperature": 0, "max_tokens": count, "ignore_eos": True} | wanted)
        for _, wanted in asked
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
    for name, warper in (
        ("min_p", MinPLogitsWarper(0.3)),
        ("top_k", TopKLogitsWarper(7)),
        ("top_p", TopPLogitsWarper(0.4)),
    ):
        value = {"min_p": 0.3, "top_k": 7, "top_p": 0.4}[name]
        kept = reference.narrowed(raw[0].numpy(), {name: value})
        np.testing.assert_array_equal(np.isfinite(kept), np.isfinite(warper(ids, raw.clone())[0].numpy()))


def test_each_parameter_alone(running, reference):
    prompt = PROMPTS[2]
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


def test_seeds_of_several_samples(running, reference):
    """vLLM gives each sample a seed of its own: the request's, plus its index."""
    (output,) = running.generate(PROMPTS[2:3], 8, n=3, temperature=1.0, seed=5)
    expected = [reference.write(PROMPTS[2], 8, temperature=1.0, seed=5 + i) for i in range(3)]
    assert [list(sample.token_ids) for sample in output.outputs] == expected


def test_without_a_seed_samples_differ_and_keep_to_min_p(running, reference):
    x = reference.logits(tuple(PROMPTS[2]))
    likely = set(np.flatnonzero(x >= x.max() + np.log(0.5)))
    (output,) = running.generate(PROMPTS[2:3], 1, n=64, temperature=1.0, min_p=0.5)
    assert {sample.token_ids[0] for sample in output.outputs} == likely
    assert len(likely) > 1


@pytest.mark.parametrize("wanted", [{"top_k": 3}, {"top_p": 0.2}, {"top_k": 4, "top_p": 0.5}], ids=str)
def test_samples_keep_to_top_k_and_top_p(wanted, running, reference, monkeypatch):
    """They are drawn by a program of ours: tpu-inference's has the host wait for the device."""
    narrowed, draw = [], sampling_program.draw
    monkeypatch.setattr(
        sampling_program, "draw", lambda *a, **k: narrowed.append(k["narrowed"]) or draw(*a, **k)
    )
    x = reference.logits(tuple(PROMPTS[2]))
    likely = set(np.flatnonzero(np.isfinite(reference.narrowed(x, wanted))))
    (output,) = running.generate(PROMPTS[2:3], 1, n=256, temperature=1.0, **wanted)
    assert {sample.token_ids[0] for sample in output.outputs} == likely
    assert len(likely) > 1
    assert set(narrowed) == {True}


def test_greedy_logits_are_read_in_the_models_dtype(repeating, monkeypatch):
    """By one program, whether or not their log probabilities are asked for; without, nobody widens them."""
    seen, most_likely, widened, widen = [], sampling_program.most_likely, [], step_inputs._widen
    monkeypatch.setattr(
        sampling_program, "most_likely", lambda x, **on: seen.append(x.dtype) or most_likely(x, **on)
    )
    with engine(repeating, dtype="bfloat16", max_logprobs=2) as running:
        inputs = step_inputs.of(running.runner)
        monkeypatch.setattr(inputs, "widen", lambda x: widened.append(x.dtype) or widen(x))
        for logprobs in (None, 2):
            seen.clear()
            (output,) = running.generate(PROMPTS[2:3], 4, logprobs=logprobs)
            assert len(seen) >= 4 and set(seen) == {jnp.dtype("bfloat16")}
            assert bool(widened) == bool(output.outputs[0].logprobs) == bool(logprobs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_programs_widen_what_they_read(dtype):
    """The first of equal logits is taken; nothing but tokens comes back unless it is to be kept."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    rng = np.random.default_rng()
    logits = jnp.asarray(np.round(rng.standard_normal((5, 300)), 1), dtype)
    wide = np.asarray(logits, np.float64)
    np.testing.assert_array_equal(sampling_program.most_likely(logits, mesh=mesh), wide.argmax(1))
    rows = sampling._neutral_rows(5, 0)
    sampling_program.views(rows, sampling_program.Rows).temperature[1:] = 0.5
    options = {"mesh": mesh, "data_axis": "data", "narrowed": False}
    key = jax.random.key(int(rng.integers(2**31)))
    tokens, kept = sampling_program.draw(key, logits, rows, keep=True, **options)
    np.testing.assert_allclose(kept, wide / np.array([1, 0.5, 0.5, 0.5, 0.5])[:, None], rtol=1e-6)
    assert tokens[0] == wide[0].argmax()
    again, nothing = sampling_program.draw(key, logits, rows, keep=False, **options)
    np.testing.assert_array_equal(tokens, again)
    assert nothing is None


def test_logprobs_are_those_before(running, reference):
    """As in vLLM, by default: of the model's logits, not of the penalised ones."""
    (output,) = running.generate(PROMPTS[2:3], 1, logit_bias={77: 100.0}, logprobs=2)
    x = reference.logits(tuple(PROMPTS[2]))
    logprobs = output.outputs[0].logprobs[0]
    assert list(output.outputs[0].token_ids) == [77]
    assert logprobs[77].logprob == pytest.approx(x[77] - np.log(np.exp(x).sum()), abs=1e-3)


def test_logprobs_are_those_drawn_from_where_the_engine_says_so(repeating, reference):
    x = reference.logits(tuple(PROMPTS[2]))
    biased = x + 2.5 * (np.arange(len(x)) == 77)
    halved = reference.narrowed(x / 0.5, {"top_k": 3})
    narrowings = [{"top_k": 2}, {"top_p": 0.2}, {"min_p": 0.5}, {"top_k": 4, "min_p": 0.5}]
    with engine(repeating, logprobs_mode="processed_logprobs", max_logprobs=5) as running:
        for logits, wanted in (
            (x, {}),
            (biased, {"logit_bias": {77: 2.5}}),
            (halved, {"temperature": 0.5, "top_k": 3}),
            *((reference.narrowed(x, narrow), {"temperature": 1.0} | narrow) for narrow in narrowings),
        ):
            (output,) = running.generate(PROMPTS[2:3], 1, logprobs=5, **wanted)
            expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            got = output.outputs[0].logprobs[0]
            assert len(got) >= 5
            # Of what is left out vLLM says -inf.
            least = min(entry.logprob for entry in got.values())
            assert (least == -np.inf) == (np.isfinite(logits).sum() < 5), wanted
            for token, entry in got.items():
                assert entry.logprob == pytest.approx(expected[token], abs=1e-3), wanted


def test_beside_structured_output(running):
    def chosen(**parameters):
        choice = StructuredOutputsParams(choice=["t17t18", "t21", "t30"])
        (output,) = running.generate(
            PROMPTS[2:3], 8, structured_outputs=choice, ignore_eos=False, **parameters
        )
        return output.outputs[0].text.strip()

    for token, text in ((17, "t17 t18"), (21, "t21"), (30, "t30")):
        assert chosen(logit_bias={token: 50.0}) == text
    # The grammar's end is all that is left before min_tokens: it may be taken.
    assert chosen(logit_bias={21: 50.0}, min_tokens=6) == "t21"


def test_chunks_shared_prefixes_and_preemption(repeating, reference):
    """A cache of 13 blocks of 16 for six sequences that grow to 6 blocks each."""
    options = {"max_num_batched_tokens": 32, "num_gpu_blocks_override": 13, "max_model_len": 128}
    with engine(repeating, enable_prefix_caching=True, **options) as running:
        wanted = [parameters(reference, PROMPTS[2])[i] for i in (0, 2, 4, 12, 13, 15)]
        asked = list(zip(LONGER, wanted, strict=True))
        for _ in range(2):
            assert ask(running, asked, 40) == [
                reference.write(prompt, 40, **wanted) for prompt, wanted in asked
            ]
        assert running.metric("num_preemptions") > 0
        assert running.metric("prefix_cache_hits") > 0


@pytest.mark.parametrize("option", ["tensor_parallel_size", "data_parallel_size"])
def test_on_two_devices(option, repeating, reference):
    asked = [(PROMPTS[i % 6], wanted) for i, wanted in enumerate([*parameters(reference, PROMPTS[2]), {}])]
    with engine(repeating, **{option: 2}) as running:
        assert ask(running, asked) == [expect(reference, *pair) for pair in asked]
        texts = [f"t{20 + i}t{35 - i}" for i in range(6)]
        if option == "data_parallel_size":
            with pytest.raises(
                VLLMValidationError, match=r"support structured_outputs with --data-parallel-size"
            ):
                running.generate(PROMPTS[:1], 2, structured_outputs=StructuredOutputsParams(choice=texts))
            return
        asked = [
            (prompt, {"structured_outputs": StructuredOutputsParams(choice=[text]), "ignore_eos": False})
            for prompt, text in zip(PROMPTS, texts, strict=True)
        ]
        expected = [[20 + i, 35 - i] for i in range(6)]
        assert [tokens[:2] for tokens in ask(running, asked)] == expected


def test_not_with_speculation(repeating, reference):
    speculation = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    with engine(repeating, speculative_config=speculation) as running:
        with pytest.raises(VLLMValidationError, match=r"repetition_penalty=1\.5 with speculative decoding"):
            running.generate(PROMPTS[:1], 2, repetition_penalty=1.5)
        with pytest.raises(
            VLLMValidationError, match=r"support structured_outputs with speculative decoding"
        ):
            running.generate(PROMPTS[:1], 2, structured_outputs=StructuredOutputsParams(choice=["t21"]))
        for name in ("logprobs", "prompt_logprobs"):
            with pytest.raises(VLLMValidationError, match=rf" {name}=0 with speculative decoding\."):
                running.generate(PROMPTS[:1], 2, **{name: 0})
        assert running.greedy(PROMPTS[2:3]) == [reference.write(PROMPTS[2], 12)]


@pytest.mark.parametrize(
    "parameter",
    [{"thinking_token_budget": 3}, {"logprob_token_ids": [3, 4]}, {"trace_decode_token_ids": [7]}],
    ids=lambda parameter: next(iter(parameter)),
)
def test_what_is_ignored_is_refused(parameter, running):
    with pytest.raises(VLLMValidationError, match=next(iter(parameter))):
        running.generate(PROMPTS[:1], 2, **parameter)
