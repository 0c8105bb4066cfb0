"""The references themselves, against torch SDPA, transformers' eager attention and a table of fp8 numbers."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from tests import reference
from tests.batches import Case, flash_attn_arguments, positions, ragged_paged_attention_arguments

torch = pytest.importorskip("torch")

from tests.gradients import flash_attn_varlen_gradients  # noqa: E402

LENS = ((3, 3), (1, 9), (7, 12), (5, 5))


def _sequences(arguments: dict) -> list[tuple]:
    """Each sequence as [1, heads, tokens, dim] float64 tensors, with the keys of a group repeated."""
    q, k, v = (torch.from_numpy(arguments[name].astype(np.float64)) for name in "qkv")
    offsets = zip(arguments["cu_seqlens_q"], arguments["cu_seqlens_k"], strict=True)
    return [
        tuple(x.transpose(0, 1)[None] for x in (q[q0:q1], k[k0:k1], v[k0:k1]))
        for (q0, k0), (q1, k1) in itertools.pairwise(offsets)
    ]


def _bottom_right_mask(len_q: int, len_k: int, left: int, right: int) -> torch.Tensor:
    i, j = torch.arange(len_q)[:, None] + len_k - len_q, torch.arange(len_k)[None]
    mask = torch.ones(len_q, len_k, dtype=torch.bool)
    if left >= 0:
        mask &= j >= i - left
    if right >= 0:
        mask &= j <= i + right
    return mask


@pytest.mark.parametrize("window", [(-1, -1), (4, -1), (-1, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("v_dim", [64, 24])
def test_against_sdpa(rng: np.random.Generator, causal: bool, window: tuple[int, int], v_dim: int) -> None:
    arguments = flash_attn_arguments(rng, Case(LENS, causal=causal, window=window, v_dim=v_dim))
    out, _ = reference.flash_attn_varlen_func(**arguments)
    expected = []
    for q, k, v in _sequences(arguments):
        mask = _bottom_right_mask(q.shape[2], k.shape[2], window[0], 0 if causal else window[1])
        sdpa = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        expected.append(sdpa[0].transpose(0, 1))
    np.testing.assert_allclose(out, torch.cat(expected).numpy(), atol=1e-12)


def test_lse_and_alibi_against_logsumexp(rng: np.random.Generator) -> None:
    arguments = flash_attn_arguments(rng, Case(LENS, alibi="SH", causal=False))
    _, lse = reference.flash_attn_varlen_func(**arguments)
    expected = []
    for s, (q, k, _) in enumerate(_sequences(arguments)):
        group = q.shape[1] // k.shape[1]
        scores = q[0] @ k[0].repeat_interleave(group, 0).transpose(1, 2) * q.shape[-1] ** -0.5
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        slopes = torch.from_numpy(arguments["alibi_slopes"][s]).double()[:, None, None]
        scores -= slopes * (i + k.shape[2] - q.shape[2] - j).abs()
        expected.append(scores.logsumexp(-1))
    np.testing.assert_allclose(lse, torch.cat(expected, 1).numpy(), atol=1e-12)


@pytest.mark.parametrize("model", ["gemma2-softcap", "gpt_oss-sinks"])
def test_against_transformers_eager(rng: np.random.Generator, model: str) -> None:
    gemma2 = pytest.importorskip("transformers.models.gemma2.modeling_gemma2")
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    case = Case(LENS, softcap=5.0) if model == "gemma2-softcap" else Case(LENS, sinks="f32")
    arguments = flash_attn_arguments(rng, case)
    out, _ = reference.flash_attn_varlen_func(**arguments)
    expected = []
    for q, k, v in _sequences(arguments):
        module = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], training=False)
        visible = _bottom_right_mask(q.shape[2], k.shape[2], -1, 0)
        mask = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -torch.inf)[None, None]
        scale = q.shape[-1] ** -0.5
        if case.sinks:
            module.sinks = torch.from_numpy(arguments["s_aux"]).double()
            result, _ = gpt_oss.eager_attention_forward(module, q, k, v, mask, scaling=scale, dropout=0.0)
        else:
            result, _ = gemma2.eager_attention_forward(
                module, q, k, v, mask, scaling=scale, softcap=case.softcap
            )
        expected.append(result[0])
    # transformers computes the softmax in float32.
    np.testing.assert_allclose(out, torch.cat(expected).numpy(), atol=2e-6)


def test_paged_is_dense(rng: np.random.Generator) -> None:
    """The same keys through a block table and as one tensor."""
    case = Case(((2, 5), (4, 16), (1, 17)), page=8)
    arguments = flash_attn_arguments(rng, case)
    paged = reference.flash_attn_varlen_func(**arguments)
    table, lengths = arguments.pop("block_table"), arguments.pop("seqused_k")
    for name in "kv":
        cache = arguments[name]
        sequences = [
            np.concatenate([cache[block] for block in row])[:length]
            for row, length in zip(table, lengths, strict=True)
        ]
        arguments[name] = np.concatenate(sequences)
    arguments["cu_seqlens_k"] = np.cumsum([0, *lengths]).astype(np.int32)
    for a, b in zip(paged, reference.flash_attn_varlen_func(**arguments), strict=True):
        np.testing.assert_array_equal(a, b)


def test_write_and_attend_is_attention_over_the_whole_cache(rng: np.random.Generator) -> None:
    """A cache without its last tokens, and those, are the cache with them."""
    case = Case(((2, 5), (4, 16), (1, 17), (3, 2)), page=8, v_dim=24, pad_tokens=2, sinks="f32")
    arguments = ragged_paged_attention_arguments(rng, case)
    whole = tuple(cache.copy() for cache in arguments["kv_cache"])
    for token, block, offset in positions(case, arguments):
        for cache, new in zip(whole, ("key", "value"), strict=True):
            cache[block, offset] = arguments[new][token]
    out, lse, cache = reference.ragged_paged_attention(**arguments)
    np.testing.assert_array_equal(cache[0], whole[0])
    np.testing.assert_array_equal(cache[1], whole[1])
    rest = {name: x for name, x in arguments.items() if name not in ("key", "value")}
    expected_out, expected_lse = reference.paged_attention(**rest | {"kv_cache": whole})
    np.testing.assert_array_equal(out, expected_out)
    np.testing.assert_array_equal(lse, expected_lse)
    assert np.isfinite(out).all()


def test_merge_is_attention_over_both_parts(rng: np.random.Generator) -> None:
    arguments = flash_attn_arguments(rng, Case(((5, 20),), causal=False))
    k, v = arguments.pop("k"), arguments.pop("v")

    def part(keys: slice) -> tuple[np.ndarray, np.ndarray]:
        arguments["cu_seqlens_k"] = np.array([0, len(k[keys])], np.int32)
        return reference.flash_attn_varlen_func(k=k[keys], v=v[keys], **arguments)

    merged = reference.merge_attn_states(*part(slice(0, 7)), *part(slice(7, 20)))
    for a, b in zip(merged, part(slice(0, 20)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_quantize_is_nearest_even_and_saturates(rng: np.random.Generator, dtype: type) -> None:
    numbers = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    table = {float(x): bits for bits, x in enumerate(numbers) if np.isfinite(x) and (x or bits == 0)}
    values = np.array(sorted(table))
    middles = (values[1:] + values[:-1]) / 2
    x = np.concatenate([values, middles, rng.normal(0, 100, 500), [1e30, np.inf, -1e30, -np.inf]])
    x = x.astype(np.float32)
    for got, value in zip(reference.quantize(x, np.float32(1), dtype).view(np.uint8), x, strict=True):
        distance = np.abs(values - np.clip(value, values[0], values[-1]))
        nearest = [table[float(v)] for v in values[distance == distance.min()]]
        even = [bits for bits in nearest if bits % 2 == 0] if len(nearest) == 2 else nearest
        assert got & (0xFF if value else 0x7F) in (*even, *(b | 0x80 for b in even if b == 0)), value
    assert np.isnan(reference.quantize(np.float32([np.nan]), np.float32(1), dtype).astype(np.float32))


@pytest.mark.parametrize(
    "case",
    [
        Case(((5, 9), (3, 3), (0, 4), (4, 0)), dim=8, softcap=3.0, alibi="SH", sinks="f32", pad_tokens=2),
        Case(((5, 9), (6, 2)), dim=8, causal=False, window=(3, 1), leftpad=True, pad_seqs=1, used=True),
    ],
    ids=str,
)
def test_gradients_against_finite_differences(rng: np.random.Generator, case: Case) -> None:
    """The gradients' reference is PyTorch's autograd through formulas of its own, this file's is NumPy."""
    arguments = flash_attn_arguments(rng, case)
    out, lse = reference.flash_attn_varlen_func(**arguments)
    grad_out, grad_lse = rng.standard_normal(out.shape), rng.standard_normal(lse.shape)
    gradients = flash_attn_varlen_gradients(arguments, grad_out, grad_lse)

    def loss(changed: dict) -> float:
        out, lse = reference.flash_attn_varlen_func(**arguments | changed)
        return (out * grad_out).sum() + np.where(np.isfinite(lse), lse * grad_lse, 0.0).sum()

    for name, gradient in gradients.items():
        values = arguments[name].astype(np.float64)
        for _ in range(20):
            at = tuple(rng.integers(size) for size in values.shape)
            if np.isnan(values[at]):  # poison, which no sequence has
                assert gradient[at] == 0
                continue
            changed = [values.copy(), values.copy()]
            for array, change in zip(changed, (1e-6, -1e-6), strict=True):
                array[at] += change
            difference = (loss({name: changed[0]}) - loss({name: changed[1]})) / 2e-6
            assert gradient[at] == pytest.approx(difference, abs=1e-6, rel=1e-5)
