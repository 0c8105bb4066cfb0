"""Numbers that are nearly 0: attention takes them as 0 on a CPU, and nobody else has to."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

import flashxla.torch as fx

TINY = 1e-40  # denormal in float32


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slope: float) -> torch.Tensor:
    offsets = torch.tensor([0, len(q)], dtype=torch.int32)
    slopes = torch.full((q.shape[1],), slope)
    return fx.flash_attn_varlen_func(
        q, k, v, len(q), offsets, len(q), offsets, causal=True, alibi_slopes=slopes
    )


@pytest.mark.parametrize("length", [1, 300])
@pytest.mark.parametrize("backward", [False, True])
def test_the_callers_arithmetic_stays_as_it_is(length: int, backward: bool) -> None:
    q, k, v = (torch.randn(length, 2, 16) for _ in range(3))
    if backward:
        attend(q.requires_grad_(), k, v, 0.5).sum().backward()
    else:
        attend(q, k, v, 0.5)
    assert (torch.tensor(TINY) * torch.ones(1)).item() > 0
    small = float("1e-300")
    assert small / 1e10 > 0  # a denormal float64


@pytest.mark.parametrize("slope", [0.3, 0.9, 3.0])
def test_weights_that_are_nearly_0(slope: float) -> None:
    """Steep slopes: the weights of a tile's first keys, and what is left of the tile before, are denormal."""
    q, k, v = (torch.randn(300, 2, 32) for _ in range(3))
    distance = torch.arange(300)[:, None] - torch.arange(300)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * 32**-0.5 - slope * distance
    weights = scores.masked_fill(distance < 0, -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, v.double())
    torch.testing.assert_close(attend(q, k, v, slope).double(), expected, atol=2e-6, rtol=1e-5)


def test_what_a_cache_holds_is_kept() -> None:
    key, value = (torch.full((1, 1, 16), TINY) for _ in range(2))
    caches = [torch.zeros(2, 4, 1, 16) for _ in range(2)]
    fx.reshape_and_cache_flash(key, value, *caches, torch.tensor([5]))
    assert all(torch.equal(cache[1, 1, 0], key[0, 0]) for cache in caches)
