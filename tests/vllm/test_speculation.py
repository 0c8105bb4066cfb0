"""Speculation by n-grams does not change what requests get: greedy tokens, and the distribution of drawn ones."""

from __future__ import annotations

import numpy as np
import pytest

from tests.vllm.checkpoints import PROMPTS
from tests.vllm.engine import engine, ngrams

VOCABULARY = 40
# Temperature (-1: greedy), top-k (0: all) and top-p of each row.
ROWS = [
    (-1.0, 0, 1.0),
    (0.5, 0, 1.0),
    (2.0, 7, 1.0),
    (2.0, 0, 0.6),
    (0.7, 5, 0.8),
    (1.5, 9, 0.4),
    (-1.0, 3, 0.5),
]


@pytest.fixture(scope="module")
def upstream():
    """tpu-inference's sampler of drafted tokens, and the one of others."""
    from vllm.platforms import current_platform

    assert current_platform.device_name
    from flashxla_vllm import overrides

    overrides.on_worker()
    from tpu_inference.layers.jax.sample import rejection_sampler, sampling

    return rejection_sampler, sampling


def metadata(rows):
    import jax.numpy as jnp
    from tpu_inference.layers.jax.sample.sampling_metadata import TPUSupportedSamplingMetadata

    temperature, top_k, top_p = map(jnp.asarray, zip(*rows, strict=True))
    return TPUSupportedSamplingMetadata(
        temperature=temperature, top_k=top_k, top_p=top_p, do_sampling=True, logprobs=False
    )


def expected(logits, temperature, top_k, top_p):
    """vLLM's order: temperature, top-k, top-p."""
    if temperature < 1e-5:
        return np.eye(len(logits))[logits.argmax()]
    order = np.argsort(-logits)
    scaled = logits[order].astype(np.float64) / temperature
    weights = np.exp(scaled - scaled[0])
    if top_k > 0:
        weights[top_k:] = 0
    weights /= weights.sum()
    before = np.cumsum(weights) - weights
    weights[before >= top_p] = 0
    result = np.zeros(len(logits))
    result[order] = weights / weights.sum()
    return result


def test_drafted_tokens_have_the_distribution_of_others(upstream):
    import jax

    rejection_sampler, sampling = upstream
    drafts = 3
    logits = np.random.default_rng(0).normal(0, 2, (len(ROWS) * drafts, VOCABULARY)).astype(np.float32)
    each = [row for row in ROWS for _ in range(drafts)]
    wanted = np.stack([expected(row, *asked) for row, asked in zip(logits, each, strict=True)])
    counts = jax.numpy.full(len(ROWS), drafts)
    drafted = rejection_sampler._compute_probs(jax.numpy.asarray(logits), counts, metadata(ROWS))
    others = jax.nn.softmax(sampling._apply_sampling_transforms(jax.numpy.asarray(logits), metadata(each)))
    np.testing.assert_allclose(drafted, wanted, atol=1e-5)
    np.testing.assert_array_equal(drafted, others)


def test_impossible_drafts_are_never_accepted(upstream, monkeypatch):
    """Not even where the random number is 0, which it is once in eight million times."""
    import jax
    import jax.numpy as jnp

    monkeypatch.setattr(jax.random, "uniform", lambda key, shape: jnp.zeros(shape))
    probabilities = jnp.asarray([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    tokens = upstream[0].rejection_sample(
        jnp.asarray([0, 2]),
        jnp.asarray([1, 1]),
        None,
        probabilities,
        jnp.asarray([1, 1]),
        True,
        jax.random.key(0),
    )
    assert tokens.tolist() == [1, 2, -1, 1]


@pytest.mark.parametrize(
    "others", [{"temperature": 1.0}, {"temperature": 1.0, "top_k": 1}], ids=["drawn", "top-1"]
)
def test_greedy_requests_beside_others(others, speculating, hf_tokens):
    from vllm import SamplingParams

    greedy = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    params = [SamplingParams(**greedy | (others if i % 2 else {})) for i in range(len(PROMPTS))]
    for _ in range(3):
        outputs = speculating.llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        exact = slice(None) if "top_k" in others else slice(None, None, 2)
        assert tokens[exact] == hf_tokens("llama", PROMPTS, 40)[exact]
    assert speculating.metric("spec_decode_num_draft_tokens") > 0


@pytest.fixture(scope="module")
def speculating(checkpoint):
    with engine(checkpoint("llama"), speculative_config=ngrams(4, 3)) as running:
        yield running
