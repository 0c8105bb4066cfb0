"""Greedy tokens equal Hugging Face's for each model family: ragged prompts, prefilled in chunks, decoded together."""

import pytest

from tests.vllm import checkpoints
from tests.vllm.checkpoints import FAMILIES
from tests.vllm.engine import engine


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_hf(family, checkpoint, hf_tokens):
    with engine(checkpoint(family)) as running:
        before = running.cache_pointers()
        assert running.greedy() == hf_tokens(family)
        assert running.cache_pointers() == before  # written in place, by every step
        head_size = running.runner.kv_caches[0].shape[-1] // 2
    assert head_size == _head_size(checkpoint(family))  # no padding


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_jax_models(family, checkpoint, hf_tokens, monkeypatch):
    """tpu-inference's own models, which MODEL_IMPL_TYPE asks for."""
    monkeypatch.setenv("MODEL_IMPL_TYPE", "flax_nnx")
    with engine(checkpoint(family)) as running:
        assert running.greedy() == hf_tokens(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_vary(family, hf_tokens):
    tokens = hf_tokens(family)
    assert sum(len(set(row)) for row in tokens) > sum(map(len, tokens)) / 2
    assert len({tuple(row) for row in tokens}) == len(tokens)


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.feature])
def test_feature_matters(family, hf_tokens):
    """The checkpoint's window, softcap or sinks decide its tokens: an engine without them fails above."""
    without = checkpoints.greedy_tokens_without_feature(FAMILIES[family])
    differing = sum(
        a != b for x, y in zip(hf_tokens(family), without, strict=True) for a, b in zip(x, y, strict=True)
    )
    assert differing > 20


def _head_size(path):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
