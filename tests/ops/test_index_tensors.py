"""Index tensors may hold anything: nothing outside the buffers is touched, and only bad entries are skipped.

On "torch" every tensor lies inside a larger buffer of NaNs, so that a stray read shows in the result and a
stray write around a cache shows there. Results that the operations allocate themselves
are watched by the sanitizers (tests/native).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from flashxla.ops import FLASH_ATTN_VARLEN_BACKWARD
from tests import reference
from tests.batches import (
    Arguments,
    Case,
    caches_of,
    flash_attn_arguments,
    normal,
    paged_attention_arguments,
    ragged_paged_attention_arguments,
    without_poison,
)
from tests.checks import DTYPES, LSE_TOLERANCE, TOLERANCE, assert_close, assert_gradients, assert_same_bits
from tests.frontends import Frontend, TorchFrontend, map_arrays
from tests.gradients import gradients_from

MARGIN = 4096  # bytes, on either side
FIXED = settings(max_examples=15, suppress_health_check=list(HealthCheck))

INT32 = [-(2**31), -(2**31) + 1, -(2**16), -2, -1, 0, 1, 2**16, 2**30, 2**31 - 2, 2**31 - 1]
INT64 = [*INT32, -(2**63), -(2**63) + 1, -(2**32), 2**31, 2**32, 2**32 + 3, 2**62, 2**63 - 1]
hostile32 = st.one_of(st.sampled_from(INT32), st.integers(-3, 70))
hostile64 = st.one_of(st.sampled_from(INT64), st.integers(-3, 70))
seeds = st.integers(0, 2**32 - 1)

LAYOUTS = {
    "NHD": (6, 8, 3, 16),
    "HND": (6, 3, 8, 16),
    "interleaved": (6, 8, 6, 16),
    "packed_HND": (6, 3, 8, 32),
    "packed_NHD": (6, 8, 3, 32),
    "stacked": (2, 6, 8, 3, 16),
}

BATCH = ((1, 17), (5, 9), (8, 8), (3, 20))
FLASH_CASES = [
    Case(BATCH, page=8, pad_tokens=3, pad_seqs=1, leftpad=True),
    Case(BATCH, page=4, pad_seqs=0, causal=False, window=(5, 3), sinks="f32", softcap=3.0),
    Case(BATCH, pad_tokens=3, pad_seqs=1, used=True, leftpad=True),
    Case(BATCH, causal=False, sinks="f32"),
    Case(BATCH, window=(6, -1), pad_seqs=2),
]
PAGED_CASES = [
    Case(BATCH, page=8, layout="interleaved", pad_tokens=3, pad_seqs=1),
    Case(BATCH, page=4, layout="packed_HND", window=(4, 0), dtype="bf16", descale="SH"),
]
# Of ragged_paged_attention: dtype of the new keys and slot_mapping with it.
RAGGED_CASES = [
    (Case(BATCH, page=8, layout="NHD", pad_tokens=3, pad_seqs=1), "same", None),
    (Case(BATCH, page=4, layout="HND", v_dim=24, causal=False), "same", "i64"),
    (Case(BATCH, page=8, layout="interleaved", cache="u8:e4m3", descale="H"), "bf16", None),
    (Case(BATCH, page=8, layout="packed_NHD", pad_tokens=2, sinks="f32"), "same", "i32"),
    (Case(BATCH, page=1, layout="stacked", pad_seqs=1), "same", "short"),
]
INDEX_TENSORS = {
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_k",
    "leftpad_k",
    "block_table",
    "num_seqs",
    "context_lens",
    "block_tables",
    "query_start_loc",
    "slot_mapping",
}


@st.composite
def corruptions(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Some of (which index tensor, which entry, what it becomes)."""
    entry = st.tuples(st.integers(0, 7), st.integers(0, 63), hostile32)
    return draw(st.lists(entry, max_size=5))


def corrupted(
    rng: np.random.Generator, arguments: Arguments, changes: list[tuple[int, int, int]]
) -> Arguments:
    """The call with bad index tensors, and numbers in place of poison, which it may see now."""
    names = sorted(INDEX_TENSORS & arguments.keys())
    for which, entry, value in changes:
        flat = arguments[names[which % len(names)]].reshape(-1)
        flat[entry % flat.size] = value
    return without_poison(rng, arguments)


def inside(frontend: TorchFrontend, array: np.ndarray, margin: float | int) -> Any:
    """A tensor in the middle of a larger buffer that is filled with `margin`."""
    torch = frontend.torch
    values = frontend.tensor(array)
    around = MARGIN // values.element_size()
    buffer = torch.full((values.numel() + 2 * around,), 1.0, device=values.device).to(values.dtype)
    if values.is_floating_point() and values.element_size() > 1:
        buffer.fill_(margin)
    else:
        buffer.view(torch.uint8).fill_(0x7F)  # NaN in the fp8 formats, 2139062143 as int32
    return buffer[around : around + values.numel()].view(values.shape).copy_(values)


def margins(frontend: TorchFrontend, tensor: Any) -> np.ndarray:
    """The bytes around a tensor of `inside`."""
    everything = frontend.torch.empty(0, dtype=frontend.torch.uint8, device=tensor.device)
    raw = frontend.array(everything.set_(tensor.untyped_storage()))
    return np.concatenate([raw[:MARGIN], raw[-MARGIN:]])


@st.composite
def writes(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of one of the two writing operations, with any slots. No slot comes twice."""
    dtype = draw(st.sampled_from([np.int32, np.int64]))
    values = hostile32 if dtype is np.int32 else hostile64
    slots = draw(st.lists(values, max_size=12, unique=True))
    layout = draw(st.sampled_from(list(LAYOUTS)))
    cache = draw(st.sampled_from(["f32", "u8"]))
    rng = np.random.default_rng(draw(seeds))
    key, value = (normal(rng, (12, 3, 16), DTYPES["f32"]) for _ in "kv")
    caches = [normal(rng, LAYOUTS[layout], DTYPES["f32"]).astype(DTYPES[cache]) for _ in "kv"]
    names = ("key_cache", "value_cache") if layout in ("NHD", "HND") else ("kv_cache",)
    return {
        "key": key,
        "value": value,
        **dict(zip(names, caches, strict=False)),
        "slot_mapping": np.array(slots, dtype),
        "layout": layout,
        "kv_cache_dtype": "fp8" if cache == "u8" else "auto",
    }


def expected_write(arguments: Arguments) -> tuple[np.ndarray, ...]:
    if "kv_cache" in arguments:
        return (reference.reshape_and_cache(**arguments),)
    return reference.reshape_and_cache_flash(**arguments)


@pytest.mark.frontends("torch")
@settings(max_examples=200)
@given(arguments=writes())
def test_slots_between_canaries(frontend: TorchFrontend, arguments: Arguments) -> None:
    tensors = {k: inside(frontend, v, np.nan) for k, v in arguments.items() if isinstance(v, np.ndarray)}
    scalars = {k: v for k, v in arguments.items() if k not in tensors}
    caches = [tensor for name, tensor in tensors.items() if "cache" in name]
    before = [margins(frontend, cache) for cache in caches]
    op = frontend.fx.reshape_and_cache if len(caches) == 1 else frontend.fx.reshape_and_cache_flash
    op(**tensors, **scalars)
    for cache, expected, old in zip(caches, expected_write(arguments), before, strict=True):
        assert_same_bits(frontend.array(cache), expected, "cache")
        assert_same_bits(margins(frontend, cache), old, "memory around the cache")


@pytest.mark.frontends("lazy", "jax_jit")
@FIXED
@given(arguments=writes())
def test_slots(frontend: Frontend, arguments: Arguments) -> None:
    if "kv_cache" in arguments:
        actual: tuple[np.ndarray, ...] = (frontend.reshape_and_cache(**arguments),)
    else:
        actual = frontend.reshape_and_cache_flash(**arguments)
    for cache, expected in zip(actual, expected_write(arguments), strict=True):
        assert_same_bits(cache, expected, "cache")


def flash_arguments(case: Case, seed: int, changes: list[tuple[int, int, int]]) -> Arguments:
    rng = np.random.default_rng(seed)
    arguments = corrupted(rng, flash_attn_arguments(rng, case), changes)
    # Bounds that no sequence of the batch can exceed: what is longer does not exist.
    arguments["max_seqlen_q"] = len(arguments["q"])
    table = arguments.get("block_table")
    arguments["max_seqlen_k"] = len(arguments["k"]) if table is None else table.shape[1] * (case.page or 0)
    return arguments


def assert_flash(out: np.ndarray, lse: np.ndarray, arguments: Arguments) -> None:
    expected_out, expected_lse = reference.flash_attn_varlen_func(**arguments)
    assert_close(out, expected_out, TOLERANCE["f32"])
    assert_close(lse, expected_lse, LSE_TOLERANCE, "lse")


@pytest.mark.frontends("torch")
@settings(max_examples=400)
@given(case=st.sampled_from(FLASH_CASES), seed=seeds, changes=corruptions())
def test_flash_attn_between_poison(
    frontend: TorchFrontend, case: Case, seed: int, changes: list[tuple[int, int, int]]
) -> None:
    arguments = flash_arguments(case, seed, changes)
    tensors = {
        k: inside(frontend, v, np.nan) if isinstance(v, np.ndarray) else v for k, v in arguments.items()
    }
    out, lse = frontend.fx.flash_attn_varlen_func(**tensors)
    assert_flash(frontend.array(out), frontend.array(lse), arguments)


@pytest.mark.frontends("lazy", "jax_jit")
@FIXED
@given(case=st.sampled_from(FLASH_CASES), seed=seeds, changes=corruptions())
def test_flash_attn(frontend: Frontend, case: Case, seed: int, changes: list[tuple[int, int, int]]) -> None:
    arguments = flash_arguments(case, seed, changes)
    out, lse = frontend.flash_attn_varlen_func(**arguments)
    assert lse is not None
    assert_flash(out, lse, arguments)


GRADIENT_CASES = [case for case in FLASH_CASES if case.page is None] + [
    Case(BATCH, dtype="bf16", dim=40, v_dim=24, pad_tokens=2, softcap=3.0, alibi="SH")
]


@pytest.mark.frontends("torch")
@settings(max_examples=300)
@given(case=st.sampled_from(GRADIENT_CASES), seed=seeds, changes=corruptions())
def test_gradients_between_poison(
    frontend: TorchFrontend, case: Case, seed: int, changes: list[tuple[int, int, int]]
) -> None:
    arguments = flash_arguments(case, seed, changes)
    rng = np.random.default_rng(seed)
    tensors = {
        k: inside(frontend, v, np.nan) if isinstance(v, np.ndarray) else v for k, v in arguments.items()
    }
    out, lse = frontend.fx.flash_attn_varlen_func(**tensors)
    grads = [normal(rng, tuple(out.shape), DTYPES[case.dtype]), normal(rng, tuple(lse.shape), DTYPES["f32"])]
    residuals = {t.name: tensors.get(t.name) for t in FLASH_ATTN_VARLEN_BACKWARD.tensors if t.name in tensors}
    left, right = arguments["window_size"]
    got = frontend.torch.ops.flashxla.flash_attn_varlen_backward(
        inside(frontend, grads[0], np.nan),
        grad_softmax_lse=inside(frontend, grads[1], np.nan),
        out=inside(frontend, frontend.array(out), np.nan),
        softmax_lse=inside(frontend, frontend.array(lse), np.nan),
        max_seqlen_q=arguments["max_seqlen_q"],
        max_seqlen_k=arguments["max_seqlen_k"],
        causal=arguments["causal"],
        window_left=left,
        window_right=right,
        softcap=arguments["softcap"],
        **residuals,
    )
    expected_gradients = gradients_from(arguments, frontend.array(out), *grads)
    for (name, expected), gradient in zip(expected_gradients.items(), got, strict=False):
        assert_gradients(frontend.array(gradient), expected, DTYPES[case.dtype], name, frontend.device)


def assert_paged(out: np.ndarray, lse: np.ndarray | None, arguments: Arguments, case: Case) -> None:
    expected_out, expected_lse = reference.paged_attention(**arguments)
    assert lse is not None
    assert_close(out, expected_out, TOLERANCE[case.dtype])
    assert_close(lse, expected_lse, LSE_TOLERANCE, "lse")


def paged_arguments(case: Case, seed: int, changes: list[tuple[int, int, int]]) -> Arguments:
    rng = np.random.default_rng(seed)
    return corrupted(rng, paged_attention_arguments(rng, case), changes)


@pytest.mark.frontends("torch")
@settings(max_examples=200)
@given(case=st.sampled_from(PAGED_CASES), seed=seeds, changes=corruptions())
def test_paged_attention_between_poison(
    frontend: TorchFrontend, case: Case, seed: int, changes: list[tuple[int, int, int]]
) -> None:
    arguments = paged_arguments(case, seed, changes)
    tensors = {
        k: inside(frontend, v, np.nan) if isinstance(v, np.ndarray) else v for k, v in arguments.items()
    }
    out, lse = map(frontend.array, frontend.fx.paged_attention(**tensors))
    assert_paged(out, lse, arguments, case)


@pytest.mark.frontends("lazy", "jax_jit")
@FIXED
@given(case=st.sampled_from(PAGED_CASES), seed=seeds, changes=corruptions())
def test_paged_attention(
    frontend: Frontend, case: Case, seed: int, changes: list[tuple[int, int, int]]
) -> None:
    arguments = paged_arguments(case, seed, changes)
    assert_paged(*frontend.paged_attention(**arguments), arguments, case)


Ragged = tuple[Case, str, str | None]


def ragged_arguments(ragged: Ragged, seed: int, changes: list[tuple[int, int, int]]) -> Arguments:
    """No slot comes twice: which token stays is then unspecified."""
    rng = np.random.default_rng(seed)
    arguments = corrupted(rng, ragged_paged_attention_arguments(rng, *ragged), changes)
    view, _ = reference.kv_views(arguments["layout"], *caches_of(arguments))
    slots = arguments.get("slot_mapping")
    if slots is None:
        names = ("context_lens", "block_tables", "query_start_loc", "num_seqs")
        index = (arguments[name] for name in names)
        slots = reference.slots_of_new_tokens(len(arguments["key"]), *view.shape[:2], *index)
    written = slots[(slots >= 0) & (slots < view.shape[0] * view.shape[1])]
    assume(len(set(written.tolist())) == len(written))
    return arguments


def assert_ragged(out: np.ndarray, lse: np.ndarray, caches: Any, arguments: Arguments) -> None:
    expected_out, expected_lse, expected_caches = reference.ragged_paged_attention(**arguments)
    for cache, expected in zip(caches, caches_of({"kv_cache": expected_caches}), strict=True):
        assert_same_bits(cache, expected, "cache")
    assert_close(out, expected_out, TOLERANCE["f32"])
    assert_close(lse, expected_lse, LSE_TOLERANCE, "lse")


@pytest.mark.frontends("torch")
@settings(max_examples=300)
@given(ragged=st.sampled_from(RAGGED_CASES), seed=seeds, changes=corruptions())
def test_ragged_paged_attention_between_poison(
    frontend: TorchFrontend, ragged: Ragged, seed: int, changes: list[tuple[int, int, int]]
) -> None:
    arguments = ragged_arguments(ragged, seed, changes)
    tensors = {
        name: map_arrays(lambda array: inside(frontend, array, np.nan), value)
        for name, value in arguments.items()
    }
    caches = caches_of(tensors)
    before = [margins(frontend, cache) for cache in caches]
    out, lse = map(frontend.array, frontend.fx.ragged_paged_attention(**tensors))
    assert_ragged(out, lse, map(frontend.array, caches), arguments)
    for cache, old in zip(caches, before, strict=True):
        assert_same_bits(margins(frontend, cache), old, "memory around the cache")


@pytest.mark.frontends("lazy", "jax_jit")
@FIXED
@given(ragged=st.sampled_from(RAGGED_CASES), seed=seeds, changes=corruptions())
def test_ragged_paged_attention(
    frontend: Frontend, ragged: Ragged, seed: int, changes: list[tuple[int, int, int]]
) -> None:
    arguments = ragged_arguments(ragged, seed, changes)
    out, lse, cache = frontend.ragged_paged_attention(**arguments)
    assert lse is not None
    assert_ragged(out, lse, caches_of({"kv_cache": cache}), arguments)


def test_one_bad_sequence_leaves_the_others(frontend: Frontend, rng: np.random.Generator) -> None:
    """In words what the random tests imply: the other rows have the very bits of the good call."""
    case = Case(BATCH, page=8)
    good = corrupted(rng, flash_attn_arguments(rng, case), [])
    out, _ = frontend.flash_attn_varlen_func(**good)
    bad = good | {"seqused_k": good["seqused_k"].copy()}
    bad["seqused_k"][1] = -5
    skipped, lse = frontend.flash_attn_varlen_func(**bad)
    rows = slice(1, 6)
    assert lse is not None
    assert not skipped[rows].any()
    assert np.isneginf(lse[:, rows]).all()
    assert_same_bits(np.delete(skipped, np.r_[rows], 0), np.delete(out, np.r_[rows], 0), "other sequences")
