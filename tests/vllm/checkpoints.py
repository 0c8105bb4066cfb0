"""Tiny random checkpoints of each model family, and what Hugging Face's implementation writes from them.

Weights are large enough that the greedy tokens vary: a model that repeats one token would hide a wrong attention.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

VOCABULARY = 512
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")  # the first tokens; no text shows them
NEW_TOKENS = 12
# Ragged: 1 to 65 tokens, 133 together.
PROMPTS = [
    [5, 6, 7],
    [9],
    list(range(10, 27)),
    list(range(30, 95)),
    [4, 4, 8, 100, 101, 33, 7],
    list(range(100, 140)),
]

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
Change = Callable[[PreTrainedModel], None]


def _nothing(model: PreTrainedModel) -> None:
    pass


@dataclasses.dataclass(frozen=True)
class Family:
    """A family's config beside what all share, and how its weights differ from the default initialisation."""

    model_type: str
    config: dict[str, Any]
    change: Change = _nothing
    # A name for what attention does in this family alone, with the config and the weights that lack it.
    feature: str = ""
    without: dict[str, Any] = dataclasses.field(default_factory=dict)
    change_without: Change = _nothing


def _small_embeddings(model: PreTrainedModel) -> None:
    """Gemma multiplies embeddings by sqrt(hidden size)."""
    weights = model.get_input_embeddings().weight.data
    weights.copy_(torch.nn.functional.normalize(torch.randn(weights.shape), dim=1) * 0.005)


def _set_sinks(value: Callable[[torch.Size], torch.Tensor]) -> Change:
    def change(model: PreTrainedModel) -> None:
        for name, weights in model.named_parameters():
            if name.endswith("sinks"):
                weights.data.copy_(value(weights.shape))

    return change


def _random_biases(model: PreTrainedModel) -> None:
    for name, weights in model.named_parameters():
        if name.endswith("bias"):
            weights.data.normal_(0, 0.2)


def _loud_layers(model: PreTrainedModel) -> None:
    """With tied embeddings BLOOM repeats its last token, unless its layers add more than that."""
    for name, weights in model.named_parameters():
        if name.endswith(("dense.weight", "dense_4h_to_h.weight")):
            weights.data.mul_(4)


FAMILIES: dict[str, Family] = {
    "llama": Family("llama", {"architectures": ["LlamaForCausalLM"]}),
    "qwen2": Family("qwen2", {"architectures": ["Qwen2ForCausalLM"]}, _random_biases),
    "qwen3": Family("qwen3", {"architectures": ["Qwen3ForCausalLM"], "head_dim": 80}),
    "mistral": Family(
        "mistral",
        {"architectures": ["MistralForCausalLM"], "sliding_window": 16, "head_dim": 64},
        feature="window",
        without={"sliding_window": None},
    ),
    "gemma2": Family(
        "gemma2",
        {
            "architectures": ["Gemma2ForCausalLM"],
            "tie_word_embeddings": True,
            "head_dim": 256,
            "query_pre_attn_scalar": 64,
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 30.0,
            "sliding_window": 16,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        _small_embeddings,
        feature="softcap",
        without={"attn_logit_softcapping": None},
        change_without=_small_embeddings,
    ),
    "gemma3": Family(
        "gemma3_text",
        {
            "architectures": ["Gemma3ForCausalLM"],
            "tie_word_embeddings": True,
            "head_dim": 256,
            "query_pre_attn_scalar": 64,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_activation": "gelu_pytorch_tanh",
        },
        _small_embeddings,
    ),
    "gpt_oss": Family(
        "gpt_oss",
        {
            "architectures": ["GptOssForCausalLM"],
            "head_dim": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        _set_sinks(lambda shape: torch.randn(shape) * 2 + 3),
        feature="sinks",
        change_without=_set_sinks(lambda shape: torch.full(shape, -1e9)),
    ),
    "phi3": Family("phi3", {"architectures": ["Phi3ForCausalLM"], "hidden_size": 384}),
    "mixtral": Family(
        "mixtral",
        {
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 128,
            "sliding_window": None,
        },
    ),
    "qwen3_moe": Family(
        "qwen3_moe",
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "head_dim": 64,
            "norm_topk_prob": True,
        },
    ),
    "gpt2": Family(
        "gpt2", {"architectures": ["GPT2LMHeadModel"], "tie_word_embeddings": True}, _random_biases
    ),
    "opt": Family(
        "opt",
        {
            "architectures": ["OPTForCausalLM"],
            "tie_word_embeddings": True,
            "ffn_dim": 256,
            "word_embed_proj_dim": 128,
            "init_std": 0.2,
        },
        _random_biases,
    ),
    "one_kv_head": Family("llama", {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 1}),
    # Not of the list that must work, but the one with ALiBi.
    "bloom": Family(
        "bloom",
        {"architectures": ["BloomForCausalLM"], "n_head": 4, "n_layer": 2, "tie_word_embeddings": True},
        _loud_layers,
    ),
}


def save(family: Family, path: Path) -> None:
    """Write the checkpoint, with a tokenizer whose words are t4 to t511 behind four special ones."""
    model = _model(family.model_type, family.config, family.change)
    model.save_pretrained(path)
    vocabulary = [*SPECIAL, *(f"t{i}" for i in range(len(SPECIAL), VOCABULARY))]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(path)


def greedy_tokens(
    path: Path, prompts: list[list[int]], count: int = NEW_TOKENS, **options: Any
) -> list[list[int]]:
    """What the saved checkpoint writes after each prompt, one prompt at a time, in float32.

    The options are those of transformers' generate.
    """
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return [_greedy(model, prompt, count, **options) for prompt in prompts]


def greedy_tokens_without_feature(family: Family) -> list[list[int]]:
    """The same of the same weights, but attention lacks the family's feature."""
    model = _model(family.model_type, family.config | family.without, family.change_without)
    return [_greedy(model, prompt, NEW_TOKENS) for prompt in PROMPTS]


def _model(model_type: str, config: dict[str, Any], change: Change) -> PreTrainedModel:
    made = AutoConfig.for_model(model_type, **_COMMON | config)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager").float().eval()
    change(model)
    return model


@torch.inference_mode()
def _greedy(model: PreTrainedModel, prompt: list[int], count: int, **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        **options,
    )
    return out[0, len(prompt) :].tolist()


def words(tokens: list[int]) -> str:
    """The text of tokens."""
    return " ".join(f"t{token}" for token in tokens if token >= len(SPECIAL))


def main() -> None:
    """Show each family's tokens, to judge whether they vary."""
    import sys
    import tempfile

    for name in sys.argv[1:] or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            save(FAMILIES[name], Path(folder))
            tokens = greedy_tokens(Path(folder), PROMPTS)
            distinct = sum(len(set(row)) for row in tokens)
            print(name, f"{distinct} distinct of {sum(map(len, tokens))}", json.dumps(tokens[:3]))
            if FAMILIES[name].feature:
                other = greedy_tokens_without_feature(FAMILIES[name])
                differ = sum(
                    a != b for x, y in zip(tokens, other, strict=True) for a, b in zip(x, y, strict=True)
                )
                print(f"    without {FAMILIES[name].feature}: {differ} tokens differ")


if __name__ == "__main__":
    main()
