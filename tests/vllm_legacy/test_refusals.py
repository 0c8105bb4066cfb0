"""What does not work is refused when the engine is made, by a message that names it. docs/vllm-legacy.md lists it."""

import pytest

from tests.vllm_legacy.engine import engine


@pytest.mark.parametrize(
    ("match", "options"),
    [
        ("tensor-parallel-size 2", {"tensor_parallel_size": 2}),
        ("pipeline-parallel-size 2", {"pipeline_parallel_size": 2}),
        ("async-scheduling", {"async_scheduling": True}),
        ("LoRA", {"enable_lora": True}),
        ("speculative decoding", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}),
        (r"quantised weights \(fp8\)", {"quantization": "fp8", "dtype": "bfloat16"}),
        ("pooling", {"runner": "pooling"}),
        ("kv-cache-dtype bfloat16", {"kv_cache_dtype": "bfloat16"}),
        ("calculate-kv-scales", {"kv_cache_dtype": "fp8", "calculate_kv_scales": True}),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value.split()[0],
)
def test_refused(match, options, checkpoint):
    with pytest.raises(Exception, match=match) as raised, engine(checkpoint("llama"), **options):
        pass
    assert "flashxla-vllm-legacy" in str(raised.value)


@pytest.mark.parametrize("family", ["mixtral", "opt"])
def test_other_architectures(family, checkpoint):
    with (
        pytest.raises(Exception, match=r"architecture \w+ForCausalLM \(accepted: .*Qwen3ForCausalLM"),
        engine(checkpoint(family)),
    ):
        pass


def test_other_devices(checkpoint, monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    with (
        pytest.raises(Exception, match="PJRT_DEVICE: got 'TPU'; accepted: CPU or CUDA"),
        engine(checkpoint("llama")),
    ):
        pass


def test_spmd(checkpoint, monkeypatch):
    monkeypatch.setenv("VLLM_XLA_USE_SPMD", "1")
    with pytest.raises(Exception, match="does not support VLLM_XLA_USE_SPMD=1"), engine(checkpoint("llama")):
        pass


def test_attention_layers_that_no_accepted_architecture_has():
    from flashxla_vllm_legacy.attention import FlashXlaImpl

    for options in ({"alibi_slopes": [0.5] * 4}, {"sinks": 1}, {"attn_type": "encoder"}):
        with pytest.raises(NotImplementedError, match=r"attention layer: got .*(alibi|sinks|encoder)"):
            FlashXlaImpl(4, 64, 0.125, 2, **options)
