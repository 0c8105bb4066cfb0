"""Text comes as soon as it is certain, and the pieces are what the tokenizer makes of all tokens together."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from flashxla.generate import DEFAULT_MODEL
from flashxla.generate.detokenizer import Detokenizer

_WORDS = ["▁", "▁▁", "▁a", "▁the", "b", "é", "€", ".", "�"]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _sentencepiece(strips_first_space: bool) -> PreTrainedTokenizerBase:
    """A tokenizer as Llama 2 and Gemma have it: spaces belong to the words after them, rare characters are bytes."""
    vocabulary = {token: number for number, token in enumerate(["<unk>", "</s>", *_BYTES, *_WORDS])}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strips_first_space:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


@cache
def tokenizer(kind: str) -> PreTrainedTokenizerBase:
    if kind == "bytes":
        return AutoTokenizer.from_pretrained(DEFAULT_MODEL)
    # One that is written in Python: it has no stream.
    return ByT5Tokenizer() if kind == "python" else _sentencepiece(strips_first_space=kind == "llama")


def decode(kind: str, tokens: list[int]) -> str:
    return tokenizer(kind).decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def stream(kind: str, prompt: list[int], tokens: list[int]) -> list[str]:
    """The pieces, one for each token."""
    detokenizer = Detokenizer(tokenizer(kind), prompt)
    pieces = [detokenizer.push(token, last=n == len(tokens)) for n, token in enumerate(tokens, 1)]
    assert not any(piece.endswith("�") for piece in pieces[:-1])
    return pieces


every_kind = pytest.mark.parametrize("kind", ["bytes", "llama", "gemma", "python"])
# Any Unicode text but lone surrogates, which UTF-8 has no bytes for.
texts = st.text(st.characters(exclude_categories=["Cs"]))


@every_kind
@given(text=texts.filter(bool), prompt=texts)
def test_pieces_are_the_text(kind: str, text: str, prompt: str) -> None:
    prompt_tokens, tokens = (tokenizer(kind)(t, add_special_tokens=False).input_ids for t in (prompt, text))
    streamed = "".join(stream(kind, prompt_tokens, tokens))
    # U+FFFD itself cannot be told from the beginning of a character, but it comes out in the end.
    assert decode(kind, prompt_tokens) + streamed == decode(kind, prompt_tokens + tokens)
    # A text may spell a special token, and then is one.
    special = any(name in text for name in tokenizer(kind).all_special_tokens)
    if kind in ("bytes", "python") and not special:
        assert streamed == text


@every_kind
@given(data=st.data())
def test_any_tokens_give_the_decoded_text(kind: str, data: st.DataObject) -> None:
    prompt = tokenizer(kind)(data.draw(st.text("a é€�."), "prompt")).input_ids
    size = len(tokenizer(kind))
    # Words, bytes that are characters, and any tokens at all.
    token = st.integers(size - len(_WORDS), size - 1) | st.integers(0, size - 1)
    character = st.sampled_from("aé€�").map(lambda c: tokenizer(kind)(c, add_special_tokens=False).input_ids)
    parts = data.draw(st.lists(character | st.lists(token, min_size=1, max_size=3), min_size=1), "tokens")
    tokens = [token for part in parts for token in part]
    streamed = "".join(stream(kind, prompt, tokens))
    expected = decode(kind, prompt + tokens)[len(decode(kind, prompt)) :]
    # Nothing is lost or repeated, though a broken character can change text that was shown.
    assert len(streamed) == len(expected)
    if "�" not in expected or kind == "bytes":
        assert streamed == expected


@pytest.mark.parametrize(
    ("kind", "prompt", "tokens", "pieces"),
    [
        ("bytes", "a", [*"é".encode(), *b"bc"], ["", "é", "b", "c"]),
        # Special tokens are no text. (256 begins a text, 257 ends it.)
        ("bytes", "a", [0xC3, 257, 0xA9, 256, 0x62], ["", "", "é", "", "b"]),
        # Broken characters come when the next is there, or at the end.
        ("bytes", "a", [0xE2, 0x82], ["", "�"]),
        ("bytes", "a", [0xE2, *b"bc"], ["", "�b", "c"]),
        ("bytes", "�", [*"é".encode(), *b"bc"], ["", "é", "b", "c"]),
        ("python", "a", [byte + 3 for byte in "éb".encode()], ["", "é", "b"]),
    ],
)
def test_text_comes_as_soon_as_it_is_certain(
    kind: str, prompt: str, tokens: list[int], pieces: list[str]
) -> None:
    assert stream(kind, tokenizer(kind)(prompt).input_ids, tokens) == pieces


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_the_space_before_a_word_comes_with_it(kind: str) -> None:
    words = tokenizer(kind).convert_tokens_to_ids(["▁the", "▁a", "b", "▁", "▁a", "</s>"])
    assert stream(kind, words[:1], words[1:]) == [" a", "b", " ", " a", ""]


def test_a_byte_that_breaks_what_was_shown() -> None:
    # The decoder turns each byte in a row into U+FFFD if not all of them are characters.
    tokens = tokenizer("llama").convert_tokens_to_ids(["<0x61>", "<0xE2>", "b", "▁a", "▁a"])
    assert stream("llama", tokens[2:], tokens) == ["a", "", "�b", " a", " a"]
