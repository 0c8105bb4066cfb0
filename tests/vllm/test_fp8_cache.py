"""A float8 cache: smaller, near the exact results, with scales, written in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flashxla_vllm.attention import LAYOUT, Mask, attend

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
    # The first token depends on attention to the quantised prompt.
    errors = []
    for a, b in zip(quantised, exact, strict=True):
        top, others = (output.outputs[0].logprobs[0] for output in (a, b))
        common = top.keys() & others.keys()
        assert len(common) >= 2
        errors += [abs(top[token].logprob - others[token].logprob) for token in common]
    assert max(errors) > 1e-4
    assert np.median(errors) < 0.3


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
