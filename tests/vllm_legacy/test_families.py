"""Greedy tokens equal Hugging Face's: ragged prompts, prefilled in chunks, decoded together."""

import json
import shutil

import pytest

from tests.vllm import checkpoints
from tests.vllm.checkpoints import FAMILIES
from tests.vllm_legacy.engine import engine

TESTED = ["llama", "qwen3", "qwen2", "mistral", "gemma2", "gemma3", "phi3"]


@pytest.mark.parametrize("family", TESTED)
def test_tokens_equal_hf(family, checkpoint, hf_tokens, tmp_path):
    with engine(readable(checkpoint(family), tmp_path)) as running:
        before = running.cache_pointers()
        assert running.greedy() == hf_tokens(family)
        assert running.cache_pointers() == before  # written in place, by every step
        config = running.llm.llm_engine.model_config
        assert running.caches[0].shape[-1] == 2 * config.get_head_size()  # no padding


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_window_and_softcap_matter(family, hf_tokens):
    """The checkpoint's window or softcap decides its tokens: an engine without it fails above."""
    without = checkpoints.greedy_tokens_without_feature(FAMILIES[family])
    differing = sum(
        a != b for x, y in zip(hf_tokens(family), without, strict=True) for a, b in zip(x, y, strict=True)
    )
    assert differing > 20


def readable(path, folder):
    """The checkpoint with the name that vLLM 0.13's Gemma2 reads, which published checkpoints have."""
    config = json.loads((path / "config.json").read_text())
    if config["model_type"] != "gemma2":
        return path
    shutil.copytree(path, folder / "checkpoint")
    config["hidden_act"] = config["hidden_activation"]
    (folder / "checkpoint" / "config.json").write_text(json.dumps(config))
    return folder / "checkpoint"
