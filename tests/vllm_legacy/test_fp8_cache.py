"""A float8 cache: smaller, near the exact results, written in place."""

import numpy as np
import pytest

from tests.vllm.checkpoints import PROMPTS
from tests.vllm_legacy.engine import engine


@pytest.fixture(scope="module")
def exact(checkpoint):
    """The best first tokens with a float32 cache. They depend on attention to the whole prompt."""
    with engine(checkpoint("llama"), max_logprobs=5) as running:
        return first_tokens(running)


@pytest.mark.parametrize(
    ("name", "dtype", "median"), [("fp8", "float8_e4m3fn", 0.3), ("fp8_e5m2", "float8_e5m2", 0.6)]
)
def test_engine_with_fp8_cache(name, dtype, median, exact, checkpoint):
    with engine(checkpoint("llama"), kv_cache_dtype=name, max_logprobs=5) as running:
        assert str(running.caches[0].dtype) == f"torch.{dtype}"
        before = running.cache_pointers()
        quantised = first_tokens(running)
        assert running.cache_pointers() == before
    errors = []
    for top, others in zip(quantised, exact, strict=True):
        common = top.keys() & others.keys()
        assert len(common) >= 2
        errors += [abs(top[token].logprob - others[token].logprob) for token in common]
    assert max(errors) > 1e-4
    assert np.median(errors) < median


def first_tokens(running):
    return [output.outputs[0].logprobs[0] for output in running.generate(PROMPTS, 1, logprobs=5)]
