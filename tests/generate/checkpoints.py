"""Small models with random weights, one for each family that docs/generate.md names, and ways to damage them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from flashxla.generate import DEFAULT_MODEL

COMMON = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
    # Far from the usual 0.02: attention must matter and logits must differ.
    "initializer_range": 0.3,
}
# A window shorter than the prompts, so that leaving it out would show.
_WINDOW = 7
CONFIGS = {
    "qwen2": lambda: transformers.Qwen2Config(
        **COMMON, use_sliding_window=True, sliding_window=_WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON | {"head_dim": 24}),
    "mistral": lambda: transformers.MistralConfig(**COMMON, sliding_window=_WINDOW),
    "gemma2": lambda: transformers.Gemma2Config(
        **COMMON,
        sliding_window=_WINDOW,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
        query_pre_attn_scalar=8,
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=259, n_embd=64, n_layer=2, n_head=4, n_positions=256, initializer_range=0.3
    ),
    "mixtral": lambda: transformers.MixtralConfig(**COMMON, num_local_experts=4),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **COMMON, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, norm_topk_prob=True
    ),
    # Multi-head latent attention: values smaller than keys. The second layer is a mixture of experts.
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{name: value for name, value in COMMON.items() if name not in ("head_dim", "num_key_value_heads")},
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        n_group=4,
        topk_group=2,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **COMMON, sliding_window=_WINDOW, num_local_experts=4, num_experts_per_tok=2
    ),
}


# Experts that look at values, which XLA has no programs for.
_OTHERS = {
    "jetmoe": lambda: transformers.JetMoeConfig(
        **{name: value for name, value in COMMON.items() if name not in ("head_dim", "num_attention_heads")},
        kv_channels=16,
        num_local_experts=4,
    ),
}


def save(kind: str, folder: Path) -> Path:
    """Make a model of a kind in a folder, with the default model's tokenizer."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config((CONFIGS | _OTHERS)[kind]())
    if kind == "gpt_oss":
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks, mean=1.0)
    model.save_pretrained(folder)
    for path in DEFAULT_MODEL.glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


def copy_default(folder: Path) -> Path:
    """A copy of the default model."""
    return shutil.copytree(DEFAULT_MODEL, folder, dirs_exist_ok=True)


def edit_json(path: Path, **changes: object) -> None:
    """Change values in a JSON file."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(content | changes), encoding="utf-8")


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change a checkpoint's tensors in place."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
