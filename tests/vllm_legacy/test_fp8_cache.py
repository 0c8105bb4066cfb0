"""A float8 cache: smaller, near the exact results, written in place."""

import numpy as np

from tests.vllm.checkpoints import PROMPTS
from tests.vllm_legacy.engine import engine


def test_engine_with_fp8_cache(checkpoint):
    with engine(checkpoint("llama"), kv_cache_dtype="fp8", max_logprobs=5) as running:
        assert str(running.caches[0].dtype) == "torch.float8_e4m3fn"
        before = running.cache_pointers()
        quantised = running.generate(PROMPTS, 1, logprobs=5)
        assert running.cache_pointers() == before
    with engine(checkpoint("llama"), max_logprobs=5) as running:
        exact = running.generate(PROMPTS, 1, logprobs=5)
    # The first token depends on attention to the quantised prompt.
    errors = []
    for a, b in zip(quantised, exact, strict=True):
        top, others = (output.outputs[0].logprobs[0] for output in (a, b))
        common = top.keys() & others.keys()
        assert len(common) >= 2
        errors += [abs(top[token].logprob - others[token].logprob) for token in common]
    assert max(errors) > 1e-4
    assert np.median(errors) < 0.3
