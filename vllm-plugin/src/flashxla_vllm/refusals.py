"""What does not work, refused when the engine is configured or a request arrives, by messages that name the setting."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Parameters of a request that neither tpu-inference's sampler nor sampling.py reads.
_IGNORED = (
    "logprob_token_ids",
    "prompt_logprob_token_ids",
    "thinking_token_budget",
    "trace_decode_token_ids",
)
# What attention.py's cache can hold; vLLM knows others, whose kernels are its own.
CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")
# Of the others tpu-inference returns log probabilities, too.
_LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
# By a feature of the engine that this process configured last: which parameters do not work with it.
_not_with: dict[str, set[str]] = {}
_STRUCTURED = {"structured_outputs"}
# Asked for by a number, of which 0 is one.
_LOGPROBS = ("logprobs", "prompt_logprobs")


def check_request(params: Any) -> None:
    """Raise for sampling parameters that would have no effect.

    Raises:
        VLLMValidationError: names them; the server answers 400.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams

    from flashxla_vllm import sampling

    if not isinstance(params, SamplingParams):
        return
    ignored = [name for name in _IGNORED if getattr(params, name, None) is not None]
    if ignored:
        raise VLLMValidationError(f"flashxla-vllm does not support {', '.join(ignored)}")
    asked = set(sampling.asks_for_more(params))
    asked.update(name for name in (*_STRUCTURED, *_LOGPROBS) if getattr(params, name) is not None)
    for feature, names in _not_with.items():
        if refused := sorted(names & asked):
            # A grammar's value is long, and says nothing more.
            values = (n if n in _STRUCTURED else f"{n}={getattr(params, n)!r}" for n in refused)
            message = f"flashxla-vllm does not support {', '.join(values)} with {feature}."
            if "logprobs" in refused:
                message += " Beam search asks for logprobs, too."
            if sampling.PARAMETERS.keys() & refused:
                message += (
                    " If the model's generation_config.json asks for it, start with --generation-config vllm."
                )
            raise VLLMValidationError(message)


def check_sleep(level: int) -> None:
    """Raise for a level of sleep that moves memory; 0 stops scheduling.

    Raises:
        VLLMValidationError: the server answers 400.
    """
    from vllm.exceptions import VLLMValidationError

    if level >= 1:
        raise VLLMValidationError(
            f"flashxla-vllm does not support sleep level {level}: weights and the cache stay on their devices. "
            "Level 0 stops scheduling, as a pause does."
        )


def check(vllm_config: VllmConfig) -> None:
    """Raise for a configuration that cannot run.

    Raises:
        NotImplementedError: names what was asked for.
    """
    from flashxla_vllm import sampling

    _not_with.clear()
    if vllm_config.speculative_config is not None:  # logits of several tokens a request
        _not_with["speculative decoding"] = {*sampling.PARAMETERS, *_STRUCTURED, *_LOGPROBS}
    if _is_multimodal(vllm_config.model_config):  # tpu-inference's runner raises in the step
        _not_with["multimodal models"] = {"prompt_logprobs"}
    if (
        vllm_config.parallel_config.data_parallel_size > 1
    ):  # tpu-inference cannot send a grammar to its schedulers
        _not_with["--data-parallel-size"] = _STRUCTURED
    reasons = list(_reasons(vllm_config))
    if reasons:
        raise NotImplementedError("flashxla-vllm does not support " + "; nor ".join(reasons))


def _is_multimodal(model: Any) -> bool:
    """As tpu-inference's runner has it: not where --limit-mm-per-prompt leaves text alone."""
    if model is None or not model.is_multimodal_model:
        return False
    limits = model.multimodal_config.limit_per_prompt
    return not limits or any(limit.count for limit in limits.values())


def _reasons(vllm_config: VllmConfig) -> Iterator[str]:
    from flashxla_vllm import quantised

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
    if vllm_config.kv_transfer_config is not None or vllm_config.cache_config.kv_offloading_size is not None:
        yield "KV connectors (--kv-transfer-config, --kv-offloading-size)"
    if vllm_config.watermark_config is not None:
        yield "watermarks (--watermark-config); tokens would have none"
    if (cache_dtype := vllm_config.cache_config.cache_dtype) not in CACHE_DTYPES:
        yield f"--kv-cache-dtype {cache_dtype}; {', '.join(CACHE_DTYPES)} work"
    if model is None:
        return
    if model.quantization is not None and model.quantization not in quantised.SUPPORTED:
        yield f"quantised weights ({model.quantization})"
    if model.logits_processors:
        yield "custom logits processors (--logits-processors); they would not be called"
    if model.logprobs_mode not in _LOGPROBS_MODES:
        yield f"--logprobs-mode {model.logprobs_mode}; {' and '.join(_LOGPROBS_MODES)} work"
    if model.enable_prompt_embeds:
        yield "prompts that are embeddings (--enable-prompt-embeds)"
    if model.runner_type == "pooling":
        if model.convert_type != "embed" or model.attn_type != "decoder":
            yield "pooling models other than embeddings of decoders (classification, rewards, encoders)"
        if parallel.data_parallel_size > 1:
            yield "pooling models with --data-parallel-size"
    if model.use_mla:
        yield "multi-head latent attention (MLA), as of DeepSeek"
    if getattr(model, "is_hybrid", False) or getattr(model, "is_attention_free", False):
        yield "models with state-space or linear attention layers"
    speculative = vllm_config.speculative_config
    if (vllm_config.additional_config or {}).get("enable_continue_decode"):
        yield "enable_continue_decode (wrong tokens with asynchronous scheduling; a full cache stops the engine)"
    if speculative is not None and speculative.method != "ngram":
        yield f"speculative decoding by {speculative.method!r}; method 'ngram' works"
