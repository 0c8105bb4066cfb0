"""What does not work is refused when the engine is made, by a message that names it. docs/vllm.md lists the same."""

import json
import shutil

import pytest
from flashxla_vllm import refusals
from flashxla_vllm.refusals import CACHE_DTYPES
from vllm import EngineArgs, SamplingParams
from vllm.config.cache import KV_CACHE_DTYPES
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor import LogitsProcessor

from tests.vllm.engine import engine


def refused(path, match, **options):
    with pytest.raises(Exception, match=match) as raised, engine(path, **options):
        pass
    assert "flashxla-vllm" in str(raised.value)


def test_pipeline_parallel(checkpoint):
    refused(checkpoint("llama"), "pipeline-parallel-size", pipeline_parallel_size=2)


def test_expert_parallel(checkpoint):
    refused(
        checkpoint("mixtral"), "enable-expert-parallel", enable_expert_parallel=True, tensor_parallel_size=2
    )


def test_ray(checkpoint, monkeypatch):
    monkeypatch.setenv("TPU_MULTIHOST_BACKEND", "ray")
    refused(checkpoint("llama"), "TPU_MULTIHOST_BACKEND.*--nnodes")


def test_ranks_that_span_machines(checkpoint):
    refused(
        checkpoint("llama"),
        "ranks that span machines",
        nnodes=4,
        node_rank=0,
        tensor_parallel_size=2,
        data_parallel_size=2,
    )


def test_steps_that_loop_on_the_device(checkpoint):
    config = {"enable_continue_decode": True}
    refused(checkpoint("llama"), "enable_continue_decode", additional_config=config, async_scheduling=False)


def test_lora(checkpoint):
    refused(checkpoint("llama"), "LoRA", enable_lora=True)


def test_quantised_weights(checkpoint):
    refused(checkpoint("llama"), r"quantised weights \(fp8\)", quantization="fp8", dtype="bfloat16")


def test_draft_models(checkpoint):
    draft = {"method": "draft_model", "model": str(checkpoint("llama")), "num_speculative_tokens": 2}
    refused(checkpoint("llama"), "speculative decoding by", speculative_config=draft)


@pytest.mark.parametrize("dtype", [dtype for dtype in KV_CACHE_DTYPES if dtype not in CACHE_DTYPES])
def test_caches_in_vllms_own_formats(dtype, checkpoint):
    """Each that vLLM knows; test_fp8_cache.py has those that work."""
    with pytest.raises(Exception, match=f"flashxla-vllm.*--kv-cache-dtype {dtype}; auto, .*fp8.* work"):
        EngineArgs(str(checkpoint("llama")), kv_cache_dtype=dtype).create_engine_config()


def test_sleep(checkpoint, hf_tokens):
    """Level 0 is a pause; others are refused before the engine pauses."""
    with engine(checkpoint("llama")) as running:
        for level in (1, 2):
            with pytest.raises(VLLMValidationError, match=f"flashxla-vllm.* sleep level {level}.*Level 0"):
                running.llm.sleep(level=level)
        assert running.greedy() == hf_tokens("llama")
        running.llm.sleep(level=0)
        running.llm.wake_up(tags=["scheduling"])
        assert running.greedy() == hf_tokens("llama")


def test_messages_for_speculation(checkpoint):
    """Beam search asks for log probabilities on its own; a grammar is named, not printed."""
    speculation = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    EngineArgs(str(checkpoint("llama")), speculative_config=speculation).create_engine_config()
    with pytest.raises(
        VLLMValidationError, match=r"logprobs=4 with speculative.*Beam search asks for logprobs"
    ):
        refusals.check_request(SamplingParams(logprobs=4))
    grammar = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"]))
    with pytest.raises(
        VLLMValidationError, match="support structured_outputs with speculative decoding"
    ) as raised:
        refusals.check_request(grammar)
    assert "Params" not in str(raised.value)


def test_kv_connectors(checkpoint):
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    refused(checkpoint("llama"), "kv-transfer-config", kv_transfer_config=transfer)
    refused(checkpoint("llama"), "kv-offloading-size", kv_offloading_size=1.0)


def test_watermarks(checkpoint):
    refused(checkpoint("llama"), "watermark-config", watermark_config={"key": 5})


def test_custom_logits_processors(checkpoint):
    class Nothing(LogitsProcessor):
        def __init__(self, *_):
            pass

        def is_argmax_invariant(self):
            return True

        def update_state(self, batch_update):
            pass

        def apply(self, logits):
            return logits

    refused(checkpoint("llama"), "custom logits processors", logits_processors=[Nothing])


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_logits_for_log_probabilities(mode, checkpoint):
    match = f"logprobs-mode {mode}; raw_logprobs and processed_logprobs work"
    refused(checkpoint("llama"), match, logprobs_mode=mode)


def test_prompts_that_are_embeddings(checkpoint):
    refused(checkpoint("llama"), "enable-prompt-embeds", enable_prompt_embeds=True)


def test_pooling_models(checkpoint):
    refused(checkpoint("llama"), "classification", runner="pooling", convert="classify")
    refused(checkpoint("llama"), "pooling models with", runner="pooling", data_parallel_size=2)


def test_latent_attention(checkpoint, tmp_path):
    """DeepSeek's attention, by its config alone."""
    path = tmp_path / "deepseek"
    shutil.copytree(checkpoint("llama"), path)
    config = json.loads((path / "config.json").read_text())
    config |= {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    }
    config.pop("head_dim", None)
    (path / "config.json").write_text(json.dumps(config))
    refused(path, "MLA")


def test_prompt_logprobs_of_multimodal_models(tmp_path):
    """Per request, by a model's config alone; not where it is to read text only."""
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2},
        "vision_config": {"model_type": "clip_vision_model", "hidden_size": 64, "num_attention_heads": 2},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = SamplingParams(prompt_logprobs=0)
    options = {"model": str(tmp_path), "skip_tokenizer_init": True}
    EngineArgs(**options).create_engine_config()
    refusals.check_request(SamplingParams(logprobs=1))
    with pytest.raises(VLLMValidationError, match="prompt_logprobs=0 with multimodal models"):
        refusals.check_request(asked)
    EngineArgs(**options, limit_mm_per_prompt={"image": 0}).create_engine_config()
    refusals.check_request(asked)
