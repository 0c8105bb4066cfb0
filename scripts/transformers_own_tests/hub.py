"""Small models with random weights in place of those that transformers' tests load from the hub.

What these tests say still means something: that a batch gives the tokens that each prompt gives alone, that requests
share blocks, that tokens are streamed. Tests that know what a model of the hub says are in the table of exceptions.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

SPECIAL = ("<unk>", "<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>")
_UNK, _PAD, _BOS, _EOS = range(4)

# So long that a prompt of the tests fills a block of 32 tokens, and not a second one.
_SYSTEM = (
    "the answer is a number or a word that we take from the library , and what is left is to be the new one ."
)
_TEMPLATE = (
    "{{ '<s> "
    + _SYSTEM
    + "' }}{% for message in messages %}{{ ' <|' + message['role'] + '|> ' + message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}{{ ' <|assistant|>' }}{% endif %}"
)

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "pad_token_id": _PAD,
    "bos_token_id": _BOS,
    "eos_token_id": _EOS,
}


def _kinds(period: int, layers: int) -> list[str]:
    """Every `period`-th layer has full attention."""
    return ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)]


_GEMMA2 = {"layer_types": _kinds(2, 4), "sliding_window": 64, "query_pre_attn_scalar": 16}
# As many layers as the model of the hub, because a test counts their groups.
_GEMMA3 = _GEMMA2 | {"num_hidden_layers": 26, "layer_types": _kinds(6, 26)}

# By name on the hub: transformers' config class, and its arguments beside _SIZES.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "HuggingFaceTB/SmolLM-1.7B": ("LlamaConfig", {}),
    "Qwen/Qwen2.5-0.5B-Instruct": ("Qwen2Config", {}),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": ("LlamaConfig", {}),
    "google/gemma-2-2b-it": ("Gemma2Config", _GEMMA2),
    "google/gemma-3-1b-it": ("Gemma3TextConfig", _GEMMA3),
    "meta-llama/Llama-3.2-3b-Instruct": ("LlamaConfig", {}),
}


def serve(texts: Iterable[Path]) -> None:
    """Let transformers' Auto classes load `MODELS`. texts: files whose words the tokenizer knows."""
    import transformers

    folders = _Folders(words(texts))
    for kind in (transformers.AutoConfig, transformers.AutoModelForCausalLM):
        kind.from_pretrained = _from_folder(kind.from_pretrained, kind.from_pretrained, folders)  # type: ignore[method-assign]
    # Not AutoTokenizer's choice: it takes each model's own class, with a vocabulary of another kind.
    auto, fast = transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast
    auto.from_pretrained = _from_folder(fast.from_pretrained, auto.from_pretrained, folders)  # type: ignore[method-assign]


def _from_folder(
    load: Callable[..., Any], load_others: Callable[..., Any], folders: _Folders
) -> Callable[..., Any]:
    def from_pretrained(name: Any, *args: Any, **kwargs: Any) -> Any:
        return load(folders[name], *args, **kwargs) if name in MODELS else load_others(name, *args, **kwargs)

    return from_pretrained


class _Folders:
    """Checkpoints by name on the hub, made when they are first asked for."""

    def __init__(self, vocabulary: list[str]) -> None:
        self._vocabulary = vocabulary
        self._root = tempfile.TemporaryDirectory()

    def __getitem__(self, name: str) -> Path:
        folder = Path(self._root.name) / name
        if not folder.exists():
            save(name, self._vocabulary, folder)
        return folder


def words(texts: Iterable[Path]) -> list[str]:
    """The words and signs of some files."""
    found = {word for path in texts for word in re.findall(r"\w+|[^\w\s]+", path.read_text(encoding="utf-8"))}
    return sorted(found | set(_SYSTEM.split()))


def save(name: str, vocabulary: list[str], folder: Path) -> None:
    """Write the checkpoint for a name on the hub."""
    import transformers

    kind, arguments = MODELS[name]
    tokenizer = _tokenizer(vocabulary)
    config = getattr(transformers, kind)(**_SIZES | arguments, vocab_size=len(tokenizer))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            # Larger than the weights of a model that is to be trained: its most likely token then stands out.
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    with torch.no_grad():
        # No text ends before its time.
        model.get_output_embeddings().weight[: len(SPECIAL)] = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(vocabulary: list[str]) -> Any:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {
        word: i for i, word in enumerate([*SPECIAL, *(word for word in vocabulary if word not in SPECIAL)])
    }
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=SPECIAL[_UNK]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=SPECIAL[_UNK],
        pad_token=SPECIAL[_PAD],
        bos_token=SPECIAL[_BOS],
        eos_token=SPECIAL[_EOS],
    )
    fast.chat_template = _TEMPLATE
    return fast
