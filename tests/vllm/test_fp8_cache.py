"""A float8 cache: smaller, near the exact results, with scales, written in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flashxla_vllm.attention import LAYOUT, Mask, attend
from flashxla_vllm.refusals import CACHE_DTYPES

from tests.vllm.checkpoints import PROMPTS
from tests.vllm.engine import engine

HEADS, KV_HEADS, SIZE, PAGE, PAGES = 4, 2, 64, 16, 8


# A JAX model quantises before the write, a PyTorch model does not.
@pytest.mark.parametrize("models", ["flax_nnx", "vllm"])
def test_engine_with_fp8_cache(models, checkpoint, monkeypatch):
    monkeypatch.setenv("MODEL_IMPL_TYPE", models)
    with engine(checkpoint("llama"), kv_cache_dtype="fp8", max_logprobs=5) as running:
        assert str(running.runner.kv_caches[0].dtype) == "float8_e4m3fn"
        before = running.cache_pointers()
        quantised = running.generate(PROMPTS, 1, logprobs=5)
        assert running.cache_pointers() == before
    with engine(checkpoint("llama"), max_logprobs=5) as running:
        exact = running.generate(PROMPTS, 1, logprobs=5)
    found = errors(quantised, exact)
    assert max(found) > 1e-4
    assert np.median(found) < 0.3


@pytest.mark.parametrize("dtype", [dtype for dtype in CACHE_DTYPES if dtype not in ("auto", "fp8")])
def test_engine_with_other_caches(dtype, checkpoint):
    """refusals.py promises that they work; vLLM wants those of 16 bits to be the model's."""
    of_model = "float32" if "fp8" in dtype else dtype
    outputs = []
    for of_cache in ("auto", dtype):
        with engine(checkpoint("llama"), dtype=of_model, kv_cache_dtype=of_cache, max_logprobs=5) as running:
            outputs.append(running.generate(PROMPTS, 1, logprobs=5))
            found = str(running.runner.kv_caches[0].dtype)
    assert found == {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}.get(dtype, dtype)
    assert np.median(errors(*outputs)) < (0.3 if "fp8" in dtype else 1e-6)


def errors(outputs, exact):
    """Of the log probabilities of first tokens, which depend on attention to the cached prompt."""
    found = []
    for a, b in zip(outputs, exact, strict=True):
        top, others = (output.outputs[0].logprobs[0] for output in (a, b))
        common = top.keys() & others.keys()
        assert len(common) >= 2
        found += [abs(top[token].logprob - others[token].logprob) for token in common]
    return found


@pytest.mark.parametrize("element", [jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 0.25)])
def test_attention_with_scales(element, scales):
    rng = np.random.default_rng(0)
    tokens = 20
    q, k, v = (
        jnp.asarray(rng.standard_normal((tokens, heads, SIZE)), jnp.float32)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    index = [jnp.asarray(x, jnp.int32) for x in ([tokens], [[3, 5, 0]], [0, tokens], [1])]

    def run(dtype, key, value, mask):
        cache = jnp.zeros((PAGES, PAGE, KV_HEADS, 2 * SIZE), dtype)
        return jax.jit(attend, static_argnums=0)(mask, cache, q, key, value, None, None, *index)

    plain = Mask(SIZE**-0.5)
    stored = [(x / s).astype(element).astype(jnp.float32) * s for x, s in zip((k, v), scales, strict=True)]
    _, expected = run(jnp.float32, *stored, plain)
    cache, out = run(element, k, v, Mask(SIZE**-0.5, k_scale=scales[0], v_scale=scales[1]))
    np.testing.assert_allclose(out, expected, atol=1e-4)
    page = np.asarray(cache[3].astype(jnp.float32)).reshape(PAGE, KV_HEADS, 2, SIZE)
    np.testing.assert_array_equal(
        page[:, :, 0], np.asarray((k[:PAGE] / scales[0]).astype(element), np.float32)
    )
    assert LAYOUT == "packed_NHD"


def test_layer_that_reads_anothers_cache():
    """Layers that share a cache do not write."""
    cache = jnp.ones((PAGES, PAGE, KV_HEADS, 2 * SIZE), jnp.float32)
    q = jnp.ones((1, HEADS, SIZE), jnp.float32)
    index = [jnp.asarray(x, jnp.int32) for x in ([5], [[3]], [0, 1], [1])]
    new, out = attend(Mask(1.0, write=False), cache, q, q[:, :KV_HEADS], q[:, :KV_HEADS], None, None, *index)
    np.testing.assert_array_equal(new, cache)
    np.testing.assert_allclose(out, 1.0, rtol=1e-6)
