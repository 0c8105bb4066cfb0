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


def check_merge_of_all(
    frontend: Frontend, outs: list[np.ndarray], lses: list[np.ndarray], dtype: str
) -> None:
    """Of a list and of one tensor, against float64."""
    expected_out, expected_lse = outs[0].astype(np.float64), lses[0].astype(np.float64)
    for other, other_lse in zip(outs, [np.full_like(lses[0], -np.inf), *lses[1:]], strict=True):
        expected_out, expected_lse = reference.merge_attn_states(expected_out, expected_lse, other, other_lse)
    for given in ((tuple(outs), tuple(lses)), (np.stack(outs), np.stack(lses))):
        out, lse = frontend.run("merge_all_attn_states", {"outs": given[0], "lses": given[1]})
        assert out.dtype == DTYPES[dtype]
        assert lse.dtype == np.float32
        # One rounding, however many states there are.
        one_rounding = {"f32": (2e-6, 2e-6), "f16": (1e-6, 2**-11), "bf16": (1e-6, 2**-8)}[dtype]
        assert_close(out, expected_out, one_rounding)
        assert_close(lse, expected_lse, LSE_TOLERANCE, "lse")


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_merge_of_all(frontend: Frontend, rng: np.random.Generator, count: int, dtype: str) -> None:
    outs = [normal(rng, (7, 4, 40), DTYPES[dtype]) for _ in range(count)]
    lses = [rng.normal(0, 3, (4, 7)).astype(np.float32) for _ in range(count)]
    lses[0][1, 2] = np.inf
    lses[-1][1, 3] = -np.inf
    for lse in lses:
        lse[2, 4] = -np.inf  # no keys at all
    for out, lse in zip(outs, lses, strict=True):
        out[np.isinf(lse).T] = np.nan
    check_merge_of_all(frontend, outs, lses, dtype)


@pytest.mark.frontends("inductor")
def test_merge_of_all_inductor(frontend: Frontend, rng: np.random.Generator) -> None:
    outs = [normal(rng, (9, 4, 72), DTYPES["bf16"]) for _ in range(4)]
    check_merge_of_all(frontend, outs, [normal(rng, (4, 9), DTYPES["f32"]) for _ in range(4)], "bf16")


@pytest.mark.parametrize("size", [1e4, -1e6])
def test_merge_of_all_with_large_lse(frontend: Frontend, rng: np.random.Generator, size: float) -> None:
    """A merged LSE is rounded, which must not weigh the later states wrongly."""
    outs = [normal(rng, (64, 4, 16), DTYPES["f32"]) for _ in range(5)]
    lses = [rng.normal(size, 3, (4, 64)).astype(np.float32) for _ in range(5)]
    check_merge_of_all(frontend, outs, lses, "f32")


OUT, LSE = np.zeros((5, 4, 16), np.float32), np.zeros((4, 5), np.float32)
WRONG = {
    "none": ((), (), ValueError, "outs: got none; accepted: at least one"),
    "a number": (3.0, (LSE,), TypeError, "outs: got 3.0; accepted: a list of tensors"),
    "counts": ((OUT, OUT), (LSE,), ValueError, "lses: got 1 LSEs; accepted: 2"),
    "one state": (OUT, LSE, ValueError, r"lses: got 4 LSEs; accepted: 5"),
    "shape": ((OUT, OUT[:, :3]), (LSE, LSE), ValueError, r"outs\[1\]: got shape \[5, 3, 16\]; accepted: \[5, 4"),
    "lse": ((OUT, OUT), (LSE, LSE.T), ValueError, r"lses\[1\]: got shape \[5, 4\]; accepted: \[4, 5\]"),
    "dtypes": ((OUT, OUT.astype(np.float16)), (LSE, LSE), TypeError, r"outs\[1\]: got dtype float16; .*: float32"),
    "integers": ((OUT.astype(np.int32),), (LSE,), TypeError, r"outs\[0\]: got dtype int32; accepted: float32, "),
    "lse's dtype": ((OUT,), (LSE.astype(np.float16),), TypeError, r"lses\[0\]: got dtype float16; .*: float32"),
}  # fmt: skip


@pytest.mark.frontends("torch", "jax")
@pytest.mark.parametrize("case", WRONG)
def test_wrong_states(frontend: Frontend, case: str) -> None:
    outs, lses, error, message = WRONG[case]
    with pytest.raises(error, match=f"^merge_all_attn_states: {message}"):
        frontend.run("merge_all_attn_states", {"outs": outs, "lses": lses})


@pytest.mark.frontends("torch", "jax")
def test_no_gradient_of_all(frontend: Frontend) -> None:
    """It is not lost on the way either: what is merged in other dtypes says so, too."""
    outs = np.ones((3, 5, 4, 16), DTYPES["bf16"])
    with pytest.raises(NotImplementedError, match=r"^merge_all_attn_states: no backward pass"):
        frontend.gradients(
            "merge_all_attn_states",
            {"outs": outs, "lses": np.zeros((3, 4, 5), np.float32)},
            ("outs",),
            (outs[0], None),
        )
