"""What does not work, refused when the engine is configured or a request arrives, by messages that name the setting."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Parameters of a request that the runner's sampler does not read, with the values that ask for nothing.
_IGNORED: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "min_tokens": (0,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "prompt_logprobs": (None,),
    "seed": (None,),
}
# Those that are tested. Others fail in many ways: experts and latent attention have kernels for TPUs only, PyTorch/XLA
# cannot trace a LayerNorm of symbolic size, the runner has no place for the state of other layers.
ARCHITECTURES = (
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")


def check_request(params: Any) -> None:
    """Raise for sampling parameters that would have no effect.

    Raises:
        ValueError: names them; the server answers 400.
    """
    asked = [
        f"{name}={value!r}"
        for name, nothing in _IGNORED.items()
        if (value := getattr(params, name, nothing[0])) not in nothing
    ]
    if asked:
        raise ValueError(
            f"flashxla-vllm-legacy does not support {', '.join(asked)}. If the model's generation_config.json asks for "
            "it, start with --generation-config vllm."
        )


def check(vllm_config: VllmConfig) -> None:
    """Raise for a configuration that cannot run.

    Raises:
        NotImplementedError: names what was asked for.
    """
    reasons = list(_reasons(vllm_config))
    if reasons:
        raise NotImplementedError("flashxla-vllm-legacy does not support " + "; nor ".join(reasons))


def _reasons(vllm_config: VllmConfig) -> Iterator[str]:
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    for name in ("tensor", "pipeline", "data"):
        size = getattr(parallel, f"{name}_parallel_size")
        if size > 1:
            yield f"--{name}-parallel-size {size} (accepted: 1); flashxla-vllm for the current vLLM does"
    if os.environ.get("VLLM_XLA_USE_SPMD", "0") != "0":
        yield "VLLM_XLA_USE_SPMD=1"
    if vllm_config.scheduler_config.async_scheduling:
        yield "--async-scheduling (the runner returns each step's tokens before the next)"
    if vllm_config.speculative_config is not None:
        yield "speculative decoding (--speculative-config)"
    if vllm_config.lora_config is not None:
        yield "LoRA adapters (--enable-lora)"
    if vllm_config.kv_transfer_config is not None:
        yield "KV transfer (--kv-transfer-config)"
    cache = vllm_config.cache_config
    if cache.cache_dtype not in _CACHE_DTYPES:
        yield f"--kv-cache-dtype {cache.cache_dtype} (accepted: {', '.join(_CACHE_DTYPES)})"
    if cache.calculate_kv_scales:
        yield "--calculate-kv-scales"
    if model is None:
        return
    if model.runner_type == "pooling":
        yield "pooling models (embeddings, classification, rewards)"
    if model.quantization is not None:
        yield f"quantised weights ({model.quantization})"
    if model.architecture not in ARCHITECTURES:
        yield f"the model's architecture {model.architecture} (accepted: {', '.join(ARCHITECTURES)})"
