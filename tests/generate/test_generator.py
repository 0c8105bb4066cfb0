"""The engine for programs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

from flashxla.generate import DEFAULT_MODEL, GenerateError, Generator, SamplingOptions

PROMPTS = ["The with statement is used to", "A list is", "Return"]
SIZES = {"num_blocks": 32, "max_seqs": 3, "max_batch_tokens": 32}


@pytest.fixture(scope="module")
def generator() -> Generator:
    return Generator(**SIZES)


def expected_tokens(count: int) -> list[list[int]]:
    """transformers' own eager generation."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEFAULT_MODEL)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        DEFAULT_MODEL, attn_implementation="eager", dtype=torch.float32
    )
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        tokens = model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0)
        found.append(tokens[0, ids.shape[1] :].tolist())
    return found


@pytest.mark.parametrize("name", ["torch", "openxla"])
def test_generate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "openxla":
        pytest.importorskip("torch_xla")
        monkeypatch.setenv("PJRT_DEVICE", "CPU")
    generator = Generator(DEFAULT_MODEL, frontend=name, **SIZES)
    expected = expected_tokens(24)
    for prompts in (PROMPTS, [generator.tokenizer(prompt).input_ids for prompt in PROMPTS]):
        results = generator.generate(prompts, 24)
        assert [r.tokens for r in results] == expected
        for result, prompt in zip(results, PROMPTS, strict=True):
            whole = generator.tokenizer.decode(result.prompt_tokens + result.tokens, skip_special_tokens=True)
            assert prompt + result.text == whole
            assert result.finish_reason == ("length" if len(result.tokens) == 24 else "stop")


def test_stream(generator: Generator) -> None:
    results = generator.generate(PROMPTS, 12)
    texts, tokens = [""] * 3, [[] for _ in range(3)]
    for piece in generator.stream(PROMPTS, 12):
        texts[piece.index] += piece.text
        tokens[piece.index].append(piece.token)
    assert texts == [r.text for r in results] and tokens == [r.tokens for r in results]


def test_sampling_repeats_by_its_seed(generator: Generator) -> None:
    first, second, other = (
        [r.tokens for r in generator.generate(PROMPTS, 20, SamplingOptions(temperature=1.0, seed=seed))]
        for seed in (1, 1, 2)
    )
    assert first == second != other


def test_a_stream_that_is_not_read_to_its_end(generator: Generator) -> None:
    """There is one cache: the newer call has it, and the older one must not go on in it."""
    expected = [r.tokens for r in generator.generate(PROMPTS, 12)]
    stream = generator.stream(PROMPTS, 12)
    next(stream)
    assert [r.tokens for r in generator.generate(PROMPTS, 12)] == expected
    with pytest.raises(RuntimeError, match="got a stream that a newer call has ended"):
        next(stream)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_blocks": 0}, "^num_blocks: got 0; accepted: a whole number >= 1"),
        ({"max_batch_tokens": 2}, "^max_batch_tokens: got 2; accepted: at least max_seqs 8"),
        ({"folder": Path("/nowhere")}, "^model: got /nowhere; accepted: a folder that holds a checkpoint"),
        ({"frontend": "jax"}, "^frontend: got 'jax'; accepted: 'torch', 'lazy'"),
        ({"frontend": "lazy", "device": "cpu"}, "^device: got 'cpu' with frontend 'lazy'; accepted: None"),
        ({"device": "tpu"}, "^device: got 'tpu'; accepted: cpu"),
        ({"dtype": "int8"}, "^dtype: got 'int8'; accepted: 'auto'"),
        ({"max_length": 10**6}, "^max_length: got 1000000; accepted: at most 512"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(GenerateError, match=message):
        Generator(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": "one"}, "^prompts: got one text; accepted: a list"),
        ({"prompts": ["a" * 600]}, "^prompt 1: got 601 tokens; accepted: at most 512"),
        ({"prompts": [[1, 10**6]]}, "makes token 1000000 of prompt 1; accepted: tokens below"),
        ({"prompts": ["a"], "max_new_tokens": 0}, "^max_new_tokens: got 0"),
        ({"prompts": ["a"], "system": "x"}, "^system: got it without chat"),
        ({"prompts": ["a"], "chat": True}, "^chat: got a model without a chat template"),
    ],
)
def test_wrong_prompts(generator: Generator, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(GenerateError, match=message):
        generator.stream(**arguments)  # before a token is asked for


def test_the_package_is_light() -> None:
    """The command line checks its options before it imports PyTorch."""
    code = "import sys, flashxla.generate; assert 'torch' not in sys.modules; flashxla.generate.nothing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "has no attribute 'nothing'" in done.stderr
