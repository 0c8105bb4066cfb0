"""merge_attn_states: one result from two over disjoint sets of keys."""

from __future__ import annotations

import numpy as np
import pytest

from tests import reference
from tests.batches import Arguments, Case, flash_attn_arguments, normal
from tests.checks import DTYPES, LSE_TOLERANCE, TOLERANCE, assert_close
from tests.frontends import Frontend

# (tokens, heads, head size)
SHAPES = [(1, 1, 1), (7, 4, 64), (3, 5, 40), (64, 8, 128), (2, 2, 256), (0, 4, 64)]


def states(rng: np.random.Generator, shape: tuple[int, int, int], dtype: str) -> Arguments:
    arguments: Arguments = {}
    for part in "ab":
        arguments[f"out_{part}"] = normal(rng, shape, DTYPES[dtype])
        arguments[f"lse_{part}"] = rng.normal(0, 3, (shape[1], shape[0])).astype(np.float32)
    return arguments


def empty(arguments: Arguments, part: str, heads: object, tokens: object, mark: float) -> None:
    """Make some states of a part empty: marked by its LSE, and with poison for a result."""
    arguments[f"lse_{part}"][heads, tokens] = mark
    arguments[f"out_{part}"][tokens, heads] = np.nan


def check_merge(frontend: Frontend, arguments: Arguments, dtype: str) -> None:
    out, lse = frontend.merge_attn_states(**arguments)
    expected_out, expected_lse = reference.merge_attn_states(**arguments)
    assert out.dtype == DTYPES[dtype]
    assert lse.dtype == np.float32
    assert_close(out, expected_out, TOLERANCE[dtype])
    assert_close(lse, expected_lse, LSE_TOLERANCE, "lse")


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_merge(frontend: Frontend, rng: np.random.Generator, shape: tuple[int, int, int], dtype: str) -> None:
    check_merge(frontend, states(rng, shape, dtype), dtype)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("mark", [-np.inf, np.inf])
def test_empty_parts(frontend: Frontend, rng: np.random.Generator, mark: float, dtype: str) -> None:
    arguments = states(rng, (6, 4, 48), dtype)
    empty(arguments, "a", slice(None), 0, mark)
    empty(arguments, "b", 1, slice(1, 3), mark)
    empty(arguments, "a", 2, 5, mark)
    empty(arguments, "b", 2, 5, -mark)  # both empty: out 0, LSE -inf
    check_merge(frontend, arguments, dtype)


def test_extreme_weights(frontend: Frontend, rng: np.random.Generator) -> None:
    """LSEs whose exponentials overflow or vanish."""
    arguments = states(rng, (5, 2, 32), "f32")
    arguments["lse_a"][:] = [500.0, -500.0, 1e30, -1e30, 88.8]
    arguments["lse_b"][:] = [499.0, -501.0, -1e30, -1e30, -88.8]
    check_merge(frontend, arguments, "f32")


@pytest.mark.parametrize("size", [1e3, 1e4, -1e4, 1e6])
def test_large_lse(frontend: Frontend, rng: np.random.Generator, size: float) -> None:
    """The weights depend on the difference alone: as exact where an LSE is large as where it is small."""
    arguments = states(rng, (64, 4, 16), "f32")
    for part in "ab":
        arguments[f"lse_{part}"] += np.float32(size)
    out, _ = frontend.merge_attn_states(**arguments)
    expected, _ = reference.merge_attn_states(**arguments)
    np.testing.assert_allclose(out, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.frontends("inductor")
def test_merge_inductor(frontend: Frontend, rng: np.random.Generator) -> None:
    check_merge(frontend, states(rng, (9, 4, 72), "bf16"), "bf16")


def test_attention_in_two_parts(frontend: Frontend, rng: np.random.Generator) -> None:
    """Attention over some keys, merged with attention over the others, is attention over all of them."""
    whole = flash_attn_arguments(rng, Case(((6, 40),), causal=False))
    parts = []
    for keys in (slice(0, 11), slice(11, 40)):
        bounds = np.array([0, keys.stop - keys.start], np.int32)
        part = whole | {"k": whole["k"][keys], "v": whole["v"][keys], "cu_seqlens_k": bounds}
        parts.append(frontend.flash_attn_varlen_func(**part))
    (out_a, lse_a), (out_b, lse_b) = parts
    out, lse = frontend.merge_attn_states(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    expected_out, expected_lse = reference.flash_attn_varlen_func(**whole)
    assert_close(out, expected_out, TOLERANCE["f32"])
    assert_close(lse, expected_lse, LSE_TOLERANCE, "lse")
