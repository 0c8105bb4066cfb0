"""Strided torch tensors: views are read and written where they are, and nothing around them changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests import reference
from tests.batches import (
    Arguments,
    Case,
    caches_of,
    flash_attn_arguments,
    normal,
    paged_attention_arguments,
    ragged_paged_attention_arguments,
)
from tests.checks import DTYPES, assert_attention, assert_gradients, assert_same_bits
from tests.frontends import TorchFrontend, map_arrays, split
from tests.gradients import cotangents, gradients_from
from tests.ops.engines import differentiated_by

pytestmark = pytest.mark.frontends("torch")

Tensor = Any
CANARY = 0x5A


def wider(dim: int) -> Callable[[TorchFrontend, Tensor], Tensor]:
    """A slice of a tensor that is larger in one dimension."""

    def view(frontend: TorchFrontend, tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        shape[dim] += 5
        base = _canaries(frontend, shape, tensor)
        return base.narrow(dim, 2, tensor.shape[dim]).copy_(tensor)

    return view


def every_other(dim: int) -> Callable[[TorchFrontend, Tensor], Tensor]:
    """Every second entry of a dimension."""

    def view(frontend: TorchFrontend, tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        shape[dim] *= 2
        at = [slice(None)] * len(shape)
        at[dim] = slice(1, None, 2)
        return _canaries(frontend, shape, tensor)[tuple(at)].copy_(tensor)

    return view


def transposed(a: int, b: int) -> Callable[[TorchFrontend, Tensor], Tensor]:
    """Two dimensions in the other order in memory."""

    def view(frontend: TorchFrontend, tensor: Tensor) -> Tensor:
        return tensor.transpose(a, b).contiguous().transpose(a, b)

    return view


def _canaries(frontend: TorchFrontend, shape: list[int], like: Tensor) -> Tensor:
    size = like.element_size() * int(np.prod(shape))
    return (
        frontend.torch.full((size,), CANARY, dtype=frontend.torch.uint8, device=like.device)
        .view(like.dtype)
        .view(shape)
    )


def base_of(frontend: TorchFrontend, view: Tensor) -> np.ndarray:
    """The bytes of a view's whole storage."""
    return frontend.array(
        frontend.torch.empty(0, dtype=frontend.torch.uint8).to(view.device).set_(view.untyped_storage())
    ).copy()


VIEWS = {
    "more_blocks": wider(0),
    "wider_pages": wider(1),
    "more_heads": wider(2),
    "longer_heads": wider(3),
    "every_other_block": every_other(0),
    "every_other_head": every_other(2),
    "every_other_element": every_other(3),
    "blocks_last": transposed(0, 3),
    "heads_first": transposed(1, 2),
}
VIEWS_3D = {
    "more_tokens": wider(0),
    "more_heads": wider(1),
    "longer_heads": wider(2),
    "every_other_token": every_other(0),
    "every_other_head": every_other(1),
    "every_other_element": every_other(2),
    "heads_first": transposed(0, 1),
    "tokens_last": transposed(0, 2),
}


@pytest.mark.parametrize("cache", ["f32", "bf16", "u8"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("view", VIEWS)
def test_write_into_view(
    frontend: TorchFrontend, rng: np.random.Generator, view: str, layout: str, cache: str
) -> None:
    dtype = DTYPES["bf16" if cache == "u8" else cache]
    key, value = (normal(rng, (9, 3, dim), dtype) for dim in (24, 10))
    pages = (4, 8, 3) if layout == "NHD" else (4, 3, 8)
    zeros = [np.zeros((*pages, dim), DTYPES[cache]) for dim in (24, 10)]
    slots = rng.permutation(32)[:9].astype(np.int64)
    slots[2] = -1
    caches = [VIEWS[view](frontend, frontend.tensor(array)) for array in zeros]
    before = [base_of(frontend, c) for c in caches]
    kv_cache_dtype = "fp8_e4m3" if cache == "u8" else "auto"
    frontend.fx.reshape_and_cache_flash(
        *(frontend.tensor(x) for x in (key, value)),
        *caches,
        frontend.tensor(slots),
        kv_cache_dtype,
        layout=layout,
    )
    expected = reference.reshape_and_cache_flash(
        key, value, zeros[0], zeros[1], slots, kv_cache_dtype, layout=layout
    )
    for tensor, empty, wanted, old in zip(caches, zeros, expected, before, strict=True):
        assert_same_bits(frontend.array(tensor), wanted, "cache")
        tensor.copy_(frontend.tensor(empty))
        assert_same_bits(base_of(frontend, tensor), old, "memory around the view")


@pytest.mark.parametrize("view", [*VIEWS_3D, "fused_qkv"])
def test_write_from_view(frontend: TorchFrontend, rng: np.random.Generator, view: str) -> None:
    key, value = (normal(rng, (9, 3, 24), DTYPES["bf16"]) for _ in "kv")
    if view == "fused_qkv":
        fused = frontend.tensor(np.concatenate([normal(rng, (9, 6, 24), key.dtype), key, value], axis=1))
        tensors = list(fused.flatten(1).split([6 * 24, 3 * 24, 3 * 24], dim=1))[1:]
        tensors = [t.view(9, 3, 24) for t in tensors]
    else:
        tensors = [VIEWS_3D[view](frontend, frontend.tensor(x)) for x in (key, value)]
    zeros = np.zeros((4, 8, 3, 24), key.dtype)
    caches = [frontend.tensor(zeros) for _ in "kv"]
    slots = rng.permutation(32)[:9].astype(np.int32)
    frontend.fx.reshape_and_cache_flash(*tensors, *caches, frontend.tensor(slots))
    expected = reference.reshape_and_cache_flash(key, value, zeros, zeros, slots)
    for tensor, wanted in zip(caches, expected, strict=True):
        assert_same_bits(frontend.array(tensor), wanted, "cache")


@pytest.mark.parametrize("layout", ["interleaved", "packed_HND", "packed_NHD", "stacked"])
@pytest.mark.parametrize("view", [*VIEWS, "other_order"])
def test_write_into_view_of_one_tensor(
    frontend: TorchFrontend, rng: np.random.Generator, layout: str, view: str
) -> None:
    shapes = {
        "interleaved": (4, 8, 6, 24),
        "packed_HND": (4, 3, 8, 48),
        "packed_NHD": (4, 8, 3, 48),
        "stacked": (2, 4, 8, 3, 24),
    }
    key, value = (normal(rng, (9, 3, 24), DTYPES["f16"]) for _ in "kv")
    zeros = np.zeros(shapes[layout], key.dtype)
    change = transposed(1, 2) if view == "other_order" else VIEWS[view]  # as vLLM permutes its cache
    cache = change(frontend, frontend.tensor(zeros))
    before = base_of(frontend, cache)
    slots = rng.permutation(32)[:9].astype(np.int64)
    frontend.fx.reshape_and_cache(
        *(frontend.tensor(x) for x in (key, value)), cache, frontend.tensor(slots), layout
    )
    expected = reference.reshape_and_cache(key, value, zeros, slots, layout)
    assert_same_bits(frontend.array(cache), expected, "kv_cache")
    cache.zero_()
    assert_same_bits(base_of(frontend, cache), before, "memory around the view")


def attend(frontend: TorchFrontend, arguments: Arguments, views: dict[str, Any]) -> None:
    """Call with some of the arguments as views."""
    tensors = {
        name: views[name](frontend, frontend.tensor(value))
        if name in views
        else frontend.tensor(value)
        if isinstance(value, np.ndarray)
        else value
        for name, value in arguments.items()
    }
    out, lse = frontend.fx.flash_attn_varlen_func(**tensors)
    expected = reference.flash_attn_varlen_func(**arguments)
    assert_attention(frontend.array(out), frontend.array(lse), expected, arguments["q"].dtype)


# Head sizes of keys and values: multiples of 16 bytes, apart, and odd.
DIMS = [(64, 64), (192, 128), (1, 3), (40, 71)]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("view", VIEWS_3D)
def test_dense_attention(
    frontend: TorchFrontend, rng: np.random.Generator, view: str, dims: tuple[int, int], dtype: str
) -> None:
    case = Case(((1, 20), (5, 9)), dim=dims[0], v_dim=dims[1], dtype=dtype, pad_tokens=2)
    arguments = flash_attn_arguments(rng, case)
    attend(frontend, arguments, dict.fromkeys("qkv", VIEWS_3D[view]))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("view", VIEWS_3D)
def test_gradients_of_views(
    frontend: TorchFrontend, rng: np.random.Generator, view: str, dims: tuple[int, int], dtype: str
) -> None:
    """Of q, k and v from the gradient of out, all of which are views: the fast engines serve any strides."""
    case = Case(((9, 20), (70, 90)), dim=dims[0], v_dim=dims[1], dtype=dtype, pad_tokens=2)
    arguments = flash_attn_arguments(rng, case)
    grad_out, grad_lse = cotangents(rng, arguments)
    tensors, scalars = split(arguments, frontend.tensor)
    sources = [VIEWS_3D[view](frontend, tensors[name]).requires_grad_() for name in "qkv"]
    tensors |= dict(zip("qkv", sources, strict=True))
    if (served := differentiated_by(frontend, tensors | scalars)) is not None:
        assert served == ("tile32" if dtype == "f32" else "wide")
    results = frontend.fx.flash_attn_varlen_func(**tensors, **scalars)
    given = [VIEWS_3D[view](frontend, frontend.tensor(grad_out)), frontend.tensor(grad_lse)]
    got = frontend.torch.autograd.grad(results, sources, given)
    expected = gradients_from(arguments, frontend.array(results[0]), grad_out, grad_lse)
    for name, gradient in zip("qkv", got, strict=True):
        assert_gradients(frontend.array(gradient), expected[name], DTYPES[dtype], name, frontend.device)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_paged_attention_over_views(
    frontend: TorchFrontend,
    rng: np.random.Generator,
    view: str,
    dims: tuple[int, int],
    layout: str,
    dtype: str,
) -> None:
    case = Case(((1, 20), (5, 9)), dim=dims[0], v_dim=dims[1], dtype=dtype, page=8, layout=layout)
    arguments = flash_attn_arguments(rng, case)
    attend(frontend, arguments, dict.fromkeys("kv", VIEWS[view]))


def test_views_of_everything_else(frontend: TorchFrontend, rng: np.random.Generator) -> None:
    """Offsets, lengths, tables, slopes, sinks and scales."""
    case = Case(
        ((1, 20), (5, 9)),
        page=8,
        alibi="SH",
        sinks="f32",
        descale="SH",
        leftpad=True,
        pad_seqs=1,
        pad_tokens=2,
    )
    one = ("cu_seqlens_q", "seqused_k", "leftpad_k", "num_seqs", "s_aux")
    two = ("block_table", "alibi_slopes", "q_descale", "k_descale", "v_descale")
    arguments = flash_attn_arguments(rng, case)
    attend(frontend, arguments, dict.fromkeys(one, every_other(0)) | dict.fromkeys(two, every_other(1)))
    attend(frontend, arguments, dict.fromkeys(one, wider(0)) | dict.fromkeys(two, transposed(0, 1)))


def test_views_of_slots_and_scales(frontend: TorchFrontend, rng: np.random.Generator) -> None:
    key, value = (normal(rng, (9, 3, 24), DTYPES["f32"]) for _ in "kv")
    zeros = np.zeros((4, 8, 3, 24), np.uint8)
    caches = [frontend.tensor(zeros) for _ in "kv"]
    slots = rng.permutation(32)[:9].astype(np.int32)
    scales = [rng.uniform(0.5, 2, 3).astype(np.float32) for _ in "kv"]
    frontend.fx.reshape_and_cache_flash(
        *(frontend.tensor(x) for x in (key, value)),
        *caches,
        *(every_other(0)(frontend, frontend.tensor(x)) for x in [slots]),
        "fp8",
        *(every_other(0)(frontend, frontend.tensor(x)) for x in scales),
    )
    expected = reference.reshape_and_cache_flash(key, value, zeros, zeros, slots, "fp8", *scales)
    for tensor, wanted in zip(caches, expected, strict=True):
        assert_same_bits(frontend.array(tensor), wanted, "cache")


def test_fused_qkv(frontend: TorchFrontend, rng: np.random.Generator) -> None:
    """q, k and v as slices of one projection."""
    arguments = flash_attn_arguments(rng, Case(((4, 4), (7, 7)), dtype="bf16"))
    fused = frontend.tensor(np.concatenate([arguments[name] for name in "qkv"], axis=1))
    parts = dict(zip("qkv", fused.split([4, 2, 2], dim=1), strict=True))
    attend(frontend, arguments, {n: lambda _, __, part=part: part for n, part in parts.items()})


def test_expanded_keys(frontend: TorchFrontend, rng: np.random.Generator) -> None:
    """A stride of zero: one head's keys under several names."""
    arguments = flash_attn_arguments(rng, Case(((4, 4), (7, 9)), heads=(4, 1)))
    expanded = arguments | {name: np.repeat(arguments[name], 4, axis=1) for name in "kv"}

    def narrow(frontend: TorchFrontend, tensor: Tensor) -> Tensor:
        return tensor[:, :1].contiguous().expand(-1, 4, -1)

    attend(frontend, expanded, dict.fromkeys("kv", narrow))


@pytest.mark.parametrize("layout", ["interleaved", "packed_HND", "packed_NHD", "stacked"])
@pytest.mark.parametrize("view", ["more_blocks", "every_other_element", "heads_first"])
def test_ragged_attention_over_views(
    frontend: TorchFrontend, rng: np.random.Generator, layout: str, view: str
) -> None:
    arguments = paged_attention_arguments(rng, Case(((1, 20), (5, 9)), page=8, layout=layout))
    tensors = {k: frontend.tensor(v) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
    tensors["kv_cache"] = VIEWS[view](frontend, tensors["kv_cache"])
    tensors["query"] = every_other(2)(frontend, tensors["query"])
    out, lse = map(frontend.array, frontend.fx.paged_attention(**tensors))
    assert_attention(out, lse, reference.paged_attention(**arguments), arguments["query"].dtype)


@pytest.mark.parametrize("cache", ["same", "u8:e4m3"])
@pytest.mark.parametrize("layout", ["NHD", "HND", "interleaved", "packed_HND", "packed_NHD", "stacked"])
@pytest.mark.parametrize("view", VIEWS)
def test_write_and_attend_over_views(
    frontend: TorchFrontend, rng: np.random.Generator, view: str, layout: str, cache: str
) -> None:
    """Caches, new keys and queries that are views; the memory around the caches stays."""
    v_dim = 40 if layout in ("NHD", "HND") else None
    case = Case(((1, 20), (5, 9)), page=8, layout=layout, cache=cache, dim=24, v_dim=v_dim, pad_tokens=2)
    arguments = ragged_paged_attention_arguments(rng, case, "f32", "i64" if view == "more_heads" else None)
    tensors = {name: map_arrays(frontend.tensor, value) for name, value in arguments.items()}
    held = [VIEWS[view](frontend, tensor) for tensor in caches_of(tensors)]
    before = [base_of(frontend, tensor) for tensor in held]
    tensors["kv_cache"] = tuple(held) if len(held) == 2 else held[0]
    tensors["query"] = every_other(2)(frontend, tensors["query"])
    tensors["key"] = transposed(0, 2)(frontend, tensors["key"])
    tensors["value"] = wider(1)(frontend, tensors["value"])
    if "slot_mapping" in tensors:
        tensors["slot_mapping"] = every_other(0)(frontend, tensors["slot_mapping"])
    out, lse = map(frontend.array, frontend.fx.ragged_paged_attention(**tensors))
    expected_out, expected_lse, new = reference.ragged_paged_attention(**arguments)
    assert_attention(out, lse, (expected_out, expected_lse), arguments["query"].dtype)
    for tensor, given, wanted, old in zip(
        held, caches_of(arguments), caches_of({"kv_cache": new}), before, strict=True
    ):
        assert_same_bits(frontend.array(tensor), wanted, "cache")
        tensor.copy_(frontend.tensor(given))
        assert_same_bits(base_of(frontend, tensor), old, "memory around the view")


def test_keys_and_values_are_views_of_one_tensor(frontend: TorchFrontend, rng: np.random.Generator) -> None:
    """Head sizes apart in one page, as multi-head latent attention has them: values are a part of the keys."""
    case = Case(((1, 20), (5, 9)), heads=(4, 1), dim=72, v_dim=64, page=8)
    arguments = flash_attn_arguments(rng, case)
    arguments["v"] = np.ascontiguousarray(arguments["k"][..., :64])
    whole = frontend.tensor(arguments["k"])
    attend(frontend, arguments, {"k": lambda _, __: whole, "v": lambda _, __: whole[..., :64]})


def test_merge_of_views(frontend: TorchFrontend, rng: np.random.Generator) -> None:
    outs = [normal(rng, (7, 4, 24), DTYPES["f32"]) for _ in "ab"]
    lses = [normal(rng, (4, 7), DTYPES["f32"]) for _ in "ab"]
    out, lse = frontend.fx.merge_attn_states(
        transposed(0, 1)(frontend, frontend.tensor(outs[0])),
        every_other(1)(frontend, frontend.tensor(lses[0])),
        every_other(2)(frontend, frontend.tensor(outs[1])),
        transposed(0, 1)(frontend, frontend.tensor(lses[1])),
    )
    expected = reference.merge_attn_states(outs[0], lses[0], outs[1], lses[1])
    np.testing.assert_allclose(frontend.array(out), expected[0], atol=2e-5)
    np.testing.assert_allclose(frontend.array(lse), expected[1], atol=2e-5)


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("name", ["key_cache", "value_cache"])
def test_expanded_caches_are_refused(frontend: TorchFrontend, name: str) -> None:
    """What is written to one page would be in all of them."""
    key, slots = (frontend.tensor(x) for x in (np.ones((2, 1, 8), np.float32), np.arange(2)))
    caches = {n: frontend.tensor(np.zeros((4, 2, 1, 8), np.float32)) for n in ("key_cache", "value_cache")}
    caches[name] = caches[name][:1].expand(4, -1, -1, -1)
    message = rf"reshape_and_cache_flash: {name}: got an expanded tensor of strides \[0, "
    for _ in range(2):  # also a call like one before
        with pytest.raises(ValueError, match=message):
            frontend.fx.reshape_and_cache_flash(key, key, **caches, slot_mapping=slots)
