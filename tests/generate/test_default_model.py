"""The default model: its tokenizer keeps every text, its size its limit, and it writes words."""

from __future__ import annotations

import re
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from flashxla.generate import DEFAULT_MODEL
from tests.generate.command_line import run_json

MAX_BYTES = 8_000_000


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEFAULT_MODEL)


# Any Unicode text but lone surrogates, which UTF-8 has no bytes for, and what spells a special token.
texts = st.text(st.characters(exclude_categories=["Cs"])).filter(
    lambda text: not any(name in text for name in tokenizer().all_special_tokens)
)


@given(text=texts)
def test_tokens_are_the_bytes(text: str) -> None:
    tokens = tokenizer()(text).input_ids
    assert tokens == [tokenizer().bos_token_id, *text.encode()]
    assert tokenizer().decode(tokens, skip_special_tokens=True) == text


def test_weights_fit() -> None:
    assert (DEFAULT_MODEL / "model.safetensors").stat().st_size <= MAX_BYTES
    card = (DEFAULT_MODEL / "README.md").read_text(encoding="utf-8")
    assert "PSF licence" in card
    assert "train_default_model.py" in card


@pytest.mark.parametrize("options", [(), ("--temperature", "0.6")], ids=["greedy", "sampled"])
def test_it_writes_words(options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    from pydoc_data.topics import topics

    known = set(re.findall(r"[a-z]+", " ".join(topics.values()).lower()))
    _, report = run_json(capsys, "--frontend", "torch", "--max-new-tokens", "120", *options)
    words: list[str] = []
    for prompt in report["prompts"]:
        # The last word may be cut off.
        words += re.findall(r"[a-z]+", prompt["text"].lower())[:-1]
    right = [word for word in words if word in known]
    assert len(words) >= 40, words
    assert len(right) / len(words) >= 0.9, words
    # A greedy choice of so small a model soon goes round in circles; noise or one endless word it is not.
    assert len(set(right)) >= 10, words
