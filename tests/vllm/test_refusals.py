"""What does not work is refused when the engine is made, by a message that names it. docs/vllm.md lists the same."""

import json
import shutil

import pytest

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
