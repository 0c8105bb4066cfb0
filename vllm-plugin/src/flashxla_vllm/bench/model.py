"""The model that is measured: a folder with a config and a tokenizer, its weights made on the device."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

_LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QUICK = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}


@dataclasses.dataclass(frozen=True)
class Work:
    """What a dense model in bfloat16 must do: operations of a prompt's token, bytes of a decode step."""

    flops_per_token: float
    weight_bytes: float
    cache_bytes_per_token: float

    def floor(
        self, prompt_tokens: int, steps: int, context_tokens: float, ceilings: dict[str, float]
    ) -> float:
        """Seconds for prompts, and for decode steps that read so many tokens of context each.

        Args:
            ceilings: this run's rates, "matmul" in operations a second and "copy" in bytes a second.
        """
        read = steps * (self.weight_bytes + context_tokens * self.cache_bytes_per_token)
        return prompt_tokens * self.flops_per_token / ceilings["matmul"] + read / ceilings["copy"]


def write(folder: Path, quick: bool) -> Work:
    """Write the model's config and a tokenizer of one word a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    config: dict[str, Any] = _LLAMA_3_8B | (_QUICK if quick else {})
    (folder / "config.json").write_text(json.dumps(config))
    special = ["<unk>", "<bos>", "<eos>"]
    vocabulary = special + [f"t{i}" for i in range(len(special), config["vocab_size"])]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(folder)
    return work(config)


def work(config: dict[str, Any]) -> Work:
    """Of a model of Llama's kind."""
    hidden, head_size = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    layer = hidden * head_size * (2 * heads + 2 * kv_heads) + 3 * hidden * config["intermediate_size"]
    layers = config["num_hidden_layers"]
    matrices = layers * layer
    return Work(
        flops_per_token=2.0 * matrices,
        weight_bytes=2.0 * (matrices + hidden * config["vocab_size"]),
        cache_bytes_per_token=2.0 * layers * 2 * kv_heads * head_size,
    )
