"""Top-k and top-p against sorts in NumPy and float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flashxla_vllm.narrowing import MASKED, top_k_top_p

VOCABULARY = 1000


def keep(x: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Which logits stay, by a sort."""
    x = x.astype(np.float64)
    kept = np.ones(len(x), bool)
    if 0 < top_k < len(x):
        kept &= x >= np.sort(x)[-top_k]
    if top_p < 1:
        weights = np.where(kept, np.exp(x - x.max()), 0)
        order = np.argsort(-x, kind="stable")
        mass = np.cumsum(weights[order]) / weights.sum()
        kept &= (
            x >= x[order[min(np.searchsorted(mass, top_p), len(x) - 1)]]
        )  # with all that are equal to the last
    return kept


def logits(kind: str, rows: int) -> np.ndarray:
    x = np.random.default_rng().normal(size=(rows, VOCABULARY)) * 3
    if kind == "ties":
        x = np.round(x)
    if kind == "one sign":
        x = -np.abs(x)
    if kind == "masked":
        x[:, 7:] = -np.inf
    if kind == "huge":
        x *= 1e36
    return x.astype(np.float32)


@pytest.mark.parametrize("kind", ["plain", "ties", "one sign", "masked", "huge"])
def test_what_stays_is_what_a_sort_finds(kind):
    asked = [(k, p) for k in (0, -1, 1, 2, 50, VOCABULARY, 10**6) for p in (1.0, 1e-6, 0.3, 0.9)]
    x = logits(kind, len(asked))
    top_k, top_p = (jnp.asarray([a[i] for a in asked], t) for i, t in enumerate((jnp.int32, jnp.float32)))
    kept = np.asarray(jax.jit(top_k_top_p)(x, top_k, top_p))
    for row, (k, p) in enumerate(asked):
        expected = keep(x[row], k, p)
        np.testing.assert_array_equal(kept[row], np.where(expected, x[row], np.float32(MASKED)), f"{k} {p}")
