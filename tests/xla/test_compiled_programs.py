"""What XLA compiled: no copy of a cache, stable pointers, and temporary memory that does not grow with the cache."""

from __future__ import annotations

import functools

import pytest

from flashxla.doctor import hlo, probe

pytest.importorskip("jax")

# The routes of other environments: tests/torchtpu.
ROUTES = ("lazy", "openxla", "jax")


@functools.cache
def run_probe(route: str, blocks: int) -> probe.Probe:
    if route != "jax":
        pytest.importorskip("torch_xla")
    return probe.run(route, layers=4, steps=4, blocks=blocks)


@pytest.mark.parametrize("route", ROUTES)
def test_writes_are_in_place(route: str) -> None:
    result = run_probe(route, 64)
    assert result.largest_error < 1e-5
    assert result.cache_copies == []
    assert result.pointers_stay
    assert result.programs == 1


@pytest.mark.parametrize("route", ROUTES)
def test_temporary_memory_does_not_grow_with_the_cache(route: str) -> None:
    small, large = run_probe(route, 64), run_probe(route, 1024)
    assert large.cache_bytes == 16 * small.cache_bytes
    assert large.temp_bytes <= small.temp_bytes < small.cache_bytes
    assert large.cache_copies == []


def test_the_check_sees_a_copy(request: pytest.FixtureRequest) -> None:
    """The proof can fail: without donation, XLA copies both caches of every layer."""
    import jax
    import jax.numpy as jnp

    import flashxla.jax as fx

    cache = jnp.zeros((64, 16, 2, 64))
    key = jnp.ones((3, 2, 64))
    step = jax.jit(lambda k, v: fx.reshape_and_cache_flash(key, key, k, v, jnp.arange(3)))
    text = step.lower(cache, cache).compile().as_text()
    copies = hlo.Program("step", text, 0).copies(at_least=cache.nbytes)
    assert len(copies) == 2 if request.config.option.device == "cpu" else copies  # a GPU's may be one fusion


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[4,2]{1,0}", 32),
        ("bf16[3]{0}", 6),
        ("(f32[2]{0}, s64[5]{0})", 40),
        ("pred[]", 1),
        ("f8e4m3fn[7,3]{1,0}", 21),
        ("u8[]", 1),
    ],
)
def test_array_bytes(shape: str, size: int) -> None:
    assert hlo.array_bytes(shape) == size
