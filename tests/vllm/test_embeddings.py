"""Embeddings of decoders: the last token's normalised hidden state, equal to Hugging Face's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModel

from tests.vllm.checkpoints import PROMPTS
from tests.vllm.engine import engine
from tests.vllm.server import start, stop

# The last is longer than a step's tokens: it comes in chunks.
TEXTS = [*PROMPTS, list(range(100, 300))]


def expected(path) -> np.ndarray:
    model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        last = [model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in TEXTS]
    return torch.nn.functional.normalize(torch.stack(last), dim=1).numpy()


@pytest.mark.parametrize("devices", [1, 2])
def test_offline(devices, checkpoint):
    """Qwen2 is one of vLLM's PyTorch models."""
    path = checkpoint("qwen2")
    with engine(path, runner="pooling", tensor_parallel_size=devices) as running:
        outputs = running.llm.embed([{"prompt_token_ids": ids} for ids in TEXTS], use_tqdm=False)
    np.testing.assert_allclose([o.outputs.embedding for o in outputs], expected(path), atol=1e-5)


def test_server(checkpoint, tmp_path):
    """Qwen3 is one of tpu-inference's JAX models."""
    path = checkpoint("qwen3")
    running = start(path, tmp_path / "log", "--runner", "pooling")
    try:
        running.wait()
        answer = running.client.embeddings.create(model="tiny", input=TEXTS)
        found = [item.embedding for item in answer.data]
    finally:
        stop(running)
    np.testing.assert_allclose(found, expected(path), atol=1e-5)
