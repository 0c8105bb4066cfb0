"""Text from tokens, piece by piece."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

# Enough of the text before a token for tokenizers whose spaces depend on it.
_CONTEXT = 6
_INCOMPLETE = "�"


class Detokenizer:
    """Turns a stream of tokens into a stream of text.

    A character spread over several tokens comes out when it is whole.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: list[int]) -> None:
        self._tokenizer = tokenizer
        self._tokens = prompt[-_CONTEXT:]
        self._start = 0
        self._shown = len(self._tokens)

    def push(self, token: int, last: bool = False) -> str:
        """Add a token. Returns the text that is now certain; with `last`, all that is left."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._start : self._shown])
        text = self._decode(self._tokens[self._start :])
        if text.endswith(_INCOMPLETE) and not last:
            return ""
        self._start = max(self._start, self._shown - _CONTEXT)
        self._shown = len(self._tokens)
        return text[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(
            self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )
