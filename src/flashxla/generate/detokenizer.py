"""Text from tokens, piece by piece."""

from __future__ import annotations

from functools import partial

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


class Detokenizer:
    """Turns a stream of tokens into a stream of text. A character spread over several tokens comes when it is whole."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: list[int]) -> None:
        self._decode = partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self._tokens = list(prompt)
        text = str(self._decode(prompt))
        self._shown = len(text)
        # A tokenizer written in Python has no stream. After a prompt that ends in U+FFFD a stream repeats the prompt.
        fast = isinstance(tokenizer, PreTrainedTokenizerFast) and not text.endswith("�")
        stream = DecodeStream(ids=prompt, skip_special_tokens=True) if fast else None
        self._step = partial(stream.step, tokenizer.backend_tokenizer) if stream else None

    def push(self, token: int, last: bool = False) -> str:
        """Add a token. Returns the text that is now certain; with `last`, all that is left."""
        self._tokens.append(token)
        if self._step and not last:
            try:
                text = self._step(token) or ""
            except Exception:  # A broken character changed text that was shown. There is no narrower type.
                self._step = None
        if not self._step or last:
            text = str(self._decode(self._tokens))[self._shown :]
        if text.endswith("�") and not last:
            return ""
        self._shown += len(text)
        return text
