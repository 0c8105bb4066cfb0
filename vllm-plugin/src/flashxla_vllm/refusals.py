"""What does not work, refused when the engine is configured or a request arrives, by messages that name the setting."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Parameters of a request that tpu-inference's sampler does not read, with the values that ask for nothing.
_IGNORED: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "min_p": (0.0,),
    "min_tokens": (0,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "seed": (None,),
}


def check_request(params: Any) -> None:
    """Raise for sampling parameters that would have no effect.

    Raises:
        VLLMValidationError: names them; the server answers 400.
    """
    from vllm.exceptions import VLLMValidationError

    asked = [
        f"{name}={value!r}"
        for name, nothing in _IGNORED.items()
        if (value := getattr(params, name, nothing[0])) not in nothing
    ]
    if asked:
        raise VLLMValidationError(
            f"flashxla-vllm does not support {', '.join(asked)}. If the model's generation_config.json asks for it, "
            "start with --generation-config vllm."
        )


def check(vllm_config: VllmConfig) -> None:
    """Raise for a configuration that cannot run.

    Raises:
        NotImplementedError: names what was asked for.
    """
    reasons = list(_reasons(vllm_config))
    if reasons:
        raise NotImplementedError("flashxla-vllm does not support " + "; nor ".join(reasons))


def _reasons(vllm_config: VllmConfig) -> Iterator[str]:
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if parallel.pipeline_parallel_size > 1:
        yield "--pipeline-parallel-size > 1 (its processes are placed on TPU chips); use --tensor-parallel-size"
    if parallel.enable_expert_parallel:
        yield "--enable-expert-parallel (its kernels are for TPUs); --tensor-parallel-size splits each expert"
    if (
        getattr(parallel, "decode_context_parallel_size", 1) > 1
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1
    ):
        yield "context parallelism"
    if parallel.nnodes_within_dp > 1 and parallel.data_parallel_size > 1:
        yield "--data-parallel-size with ranks that span machines (--nnodes); each rank must fit in one machine"
    if parallel.data_parallel_backend == "ray" or parallel.distributed_executor_backend == "ray":
        yield "Ray (it places workers on TPUs); --nnodes and --data-parallel-address join machines"
    if os.environ.get("TPU_MULTIHOST_BACKEND"):
        yield "TPU_MULTIHOST_BACKEND (its executors are for TPU hosts); unset it, and use --nnodes"
    if vllm_config.lora_config is not None:
        yield "LoRA adapters (--enable-lora)"
    if model is None:
        return
    if model.quantization is not None:
        yield f"quantised weights ({model.quantization})"
    if model.runner_type == "pooling":
        yield "pooling models (embeddings, classification, rewards)"
    if model.use_mla:
        yield "multi-head latent attention (MLA), as of DeepSeek"
    if getattr(model, "is_hybrid", False) or getattr(model, "is_attention_free", False):
        yield "models with state-space or linear attention layers"
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method != "ngram":
        yield f"speculative decoding by {speculative.method!r}; method 'ngram' works"
