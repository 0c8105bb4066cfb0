"""Norms of 16-bit sums: rounded before the norm, as transformers does, and XLA cannot leave the rounding out.
Rotary embeddings: in one expression, with vLLM's results.
"""

import types

import jax
import jax.numpy as jnp
import pytest
import torch
import torchax
from flashxla_vllm import overrides, tracing
from torchax.interop import jax_view, torch_view


@pytest.fixture(scope="module", autouse=True)
def platform():
    overrides.on_platform()
    overrides.on_worker()


def rms_norm(x, residual=None):
    """vLLM's, of the sum in float32."""
    wide = x.to(torch.float32)
    if residual is not None:
        wide = wide + residual.to(torch.float32)
    normed = (wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + 1e-6)).to(x.dtype)
    return normed if residual is None else (normed, wide.to(x.dtype))


def program(x, residual):
    op = types.SimpleNamespace(_forward_method=rms_norm)
    return jax_view(tracing.norm(op, torch_view(x), torch_view(residual)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_norm_of_a_sum(dtype):
    keys = jax.random.split(jax.random.key(torch.initial_seed() % 2**31))
    x, residual = (3 * jax.random.normal(key, (5, 64), dtype) for key in keys)
    with torchax.default_env():
        normed, total = jax.jit(program)(x, residual)
        lowered = jax.jit(program).lower(x, residual).as_text()
    assert normed.dtype == total.dtype == dtype
    expected = x.astype(jnp.float32) + residual.astype(jnp.float32)
    assert (total == expected.astype(dtype)).all()
    wide = (total if dtype != jnp.float32 else expected).astype(jnp.float32)
    reference = wide / jnp.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    assert jnp.abs(normed.astype(jnp.float32) - reference).max() <= 4 * jnp.finfo(dtype).eps * 4
    # One keeps the sum's rounding, one the norm's product with its weight.
    assert lowered.count("optimization_barrier") == (0 if dtype == jnp.float32 else 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("neox", [True, False])
def test_rotary_embedding(dtype, neox):
    """As vLLM's own does it with plain tensors. It gets part of a tensor, for which torchax has its own class."""
    from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb

    x, angles = torch.randn(7, 3, 16).to(dtype), 100 * torch.rand(7, 8)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = ApplyRotaryEmb.forward_static(x, cos, sin, neox)

    def rotate(*arrays):
        x, cos, sin = torch_view(arrays)
        return jax_view(ApplyRotaryEmb.forward_static(x[..., :16], cos, sin, neox))

    with torchax.default_env():
        arrays = tuple(jax_view(y.to("jax")) for y in (x, cos, sin))
        got = jax.jit(rotate)(*arrays)
        lowered = jax.jit(rotate).lower(*arrays).as_text()
    assert ("stablehlo.reverse" in lowered) == neox
    difference = jnp.abs(got.astype(jnp.float32) - jnp.asarray(expected.float().numpy()))
    assert difference.max() <= 4 * torch.finfo(dtype).eps * 4
