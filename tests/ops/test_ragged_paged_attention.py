"""ragged_paged_attention: the write of new keys and values and the attention over the whole cache, in one call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests import reference
from tests.batches import (
    Arguments,
    Case,
    caches_of,
    positions,
    qkvpacked,
    ragged_paged_attention_arguments,
    without_poison,
)
from tests.checks import assert_attention, assert_same_bits
from tests.frontends import Frontend, JaxFrontend, TorchFrontend, has_arrays, map_arrays
from tests.ops.engines import rounding_of_weights

MIXED = ((1, 33), (5, 18), (9, 9), (4, 4))
DECODE = ((1, 1), (1, 40), (1, 17))
SPARSE = ((0, 5), (2, 6), (0, 0), (3, 0), (4, 2), (1, 1))  # no queries, no keys, more queries than keys
LAYOUTS = ("NHD", "HND", "interleaved", "packed_HND", "packed_NHD", "stacked")

# case, dtype of the new keys, slot_mapping (tests/batches.py)
CASES = [
    # layouts, and where the tokens go
    (Case(MIXED, layout="NHD", page=16, pad_tokens=4, pad_seqs=3), "same", None),
    (Case(MIXED, layout="HND", page=8, dtype="bf16", pad_tokens=1), "same", "i32"),
    (Case(MIXED, layout="interleaved", page=16, dtype="f16", pad_tokens=3), "same", "i64"),
    (Case(MIXED, layout="packed_HND", page=17, pad_tokens=3, lse=False), "same", "short"),
    (Case(MIXED, layout="packed_NHD", page=1, pad_seqs=1), "same", None),
    (Case(MIXED, layout="stacked", page=8, dtype="bf16", lse=False), "same", None),
    (
        Case(DECODE, layout="interleaved", page=16, heads=(8, 1), dim=128, dtype="bf16", pad_seqs=5),
        "same",
        None,
    ),
    (Case(SPARSE, layout="NHD", page=8, pad_seqs=2), "same", None),
    # into fp8 caches: quantized, or copied
    (Case(MIXED, layout="NHD", page=16, dtype="bf16", cache="u8:e4m3", descale="H"), "bf16", None),
    (Case(MIXED, layout="interleaved", page=8, cache="u8:e5m2", descale="1", pad_tokens=2), "f16", "i64"),
    (Case(MIXED, layout="stacked", page=16, dtype="f16", cache="e4m3"), "f32", "short"),
    (Case(MIXED, layout="packed_HND", page=8, dtype="e4m3", cache="e4m3", descale="1"), "bf16", None),
    (Case(MIXED, layout="HND", page=16, dtype="bf16", cache="e5m2", descale="H"), "same", None),
    (Case(MIXED, layout="packed_NHD", page=8, dtype="f16", cache="u8:e4m3", descale="H"), "same", "i32"),
    (Case(MIXED, layout="NHD", page=8, dtype="bf16", descale="H"), "same", None),  # not stored as x / scale
    # scores and masks
    (Case(MIXED, layout="NHD", page=16, sinks="f32", window=(9, 0), softcap=5.0), "same", None),
    (Case(MIXED, layout="interleaved", page=8, dtype="bf16", causal=False, alibi="H"), "same", None),
    (Case(MIXED, layout="HND", page=8, causal=False, window=(4, 3), alibi="SH", sinks="f16"), "same", "i32"),
    # head sizes of keys and values
    (Case(MIXED, layout="NHD", page=16, heads=(4, 1), dim=576, v_dim=512, dtype="bf16"), "same", None),
    (Case(MIXED, layout="HND", page=8, dim=192, v_dim=128, cache="u8:e4m3", descale="1"), "f32", "i64"),
    (Case(DECODE, layout="NHD", page=1, heads=(3, 3), dim=1, v_dim=3), "same", None),
    (Case(MIXED, layout="HND", page=17, dim=40, v_dim=72, dtype="f16"), "same", "short"),
]


def assert_caches(actual: Any, expected: Any) -> None:
    """The whole cache: written slots and all others."""
    pairs = zip(caches_of({"kv_cache": actual}), caches_of({"kv_cache": expected}), strict=True)
    for number, (got, wanted) in enumerate(pairs):
        assert_same_bits(got, wanted, f"tensor {number} of kv_cache")


def assert_right(frontend: Frontend, arguments: Arguments, out: Any, lse: Any, cache: Any) -> None:
    expected_out, expected_lse, expected_cache = reference.ragged_paged_attention(**arguments)
    assert_caches(cache, expected_cache)
    rounding = rounding_of_weights(frontend, "ragged_paged_attention", arguments)
    assert_attention(out, lse, (expected_out, expected_lse), arguments["query"].dtype, rounding)


def check(frontend: Frontend, arguments: Arguments) -> None:
    assert_right(frontend, arguments, *frontend.ragged_paged_attention(**arguments))


def check_packed(frontend: Frontend, arguments: Arguments) -> None:
    """Queries, keys and values in one tensor, against the reference and, to the bit, the call with three."""
    packed = qkvpacked(arguments)
    assert packed is not None
    out, lse, cache = frontend.ragged_paged_attention_qkvpacked(**packed)
    apart, lse_apart, cache_apart = frontend.ragged_paged_attention(**arguments)
    assert_same_bits(out, apart, "out")
    if lse is not None and lse_apart is not None:
        assert_same_bits(lse, lse_apart, "lse")
    assert_caches(cache, cache_apart)
    assert_right(frontend, arguments, out, lse, cache)


@pytest.mark.parametrize(("case", "new", "slots"), CASES, ids=str)
def test_case(frontend: Frontend, rng: np.random.Generator, case: Case, new: str, slots: str | None) -> None:
    check(frontend, ragged_paged_attention_arguments(rng, case, new, slots))


PACKED = [(case, slots) for case, _, slots in CASES if case.v_dim in (None, case.dim)]


@pytest.mark.parametrize(("case", "slots"), PACKED, ids=str)
def test_packed(frontend: Frontend, rng: np.random.Generator, case: Case, slots: str | None) -> None:
    new = "same" if case.cache == "same" else case.dtype
    check_packed(frontend, ragged_paged_attention_arguments(rng, case, new, slots))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_promised_lengths(frontend: Frontend, rng: np.random.Generator, dtype: str) -> None:
    """Of a step that only decodes."""
    lens = ((1, 9), (1, 300), (0, 4), (1, 1))
    case = Case(lens, (8, 2), 64, dtype, page=16, layout="packed_NHD", pad_tokens=5, pad_seqs=2)
    check(frontend, ragged_paged_attention_arguments(rng, case, "same", None) | {"max_seqlen_q": 1})


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("dtype", "cache", "new"),
    [
        *((dtype, "same", "same") for dtype in ("f32", "f16", "bf16")),
        *(("bf16", cache, new) for cache in ("e4m3", "u8:e5m2") for new in ("f32", "f16", "bf16", "same")),
    ],
)
@pytest.mark.parametrize("slots", [None, "i32", "i64", "short"])
@pytest.mark.parametrize("page", [1, 16])
def test_every_layout_and_format(
    frontend: Frontend,
    rng: np.random.Generator,
    layout: str,
    dtype: str,
    cache: str,
    new: str,
    slots: str | None,
    page: int,
) -> None:
    kv_heads, dim = int(rng.integers(1, 4)), int(rng.choice([1, 7, 40, 64, 80]))
    v_dim = int(rng.integers(1, 80)) if layout in ("NHD", "HND") and rng.random() < 0.5 else None
    case = Case(
        SPARSE if rng.random() < 0.5 else MIXED,
        *((kv_heads * int(rng.integers(1, 4)), kv_heads), dim, dtype, cache, page, layout),
        causal=bool(rng.integers(2)),
        sinks=None if rng.random() < 0.5 else "f32",
        descale=None if cache == "same" else str(rng.choice(["1", "H"])),
        pad_tokens=2,
        pad_seqs=1,
        v_dim=v_dim,
    )
    check(frontend, ragged_paged_attention_arguments(rng, case, new, slots))


@pytest.mark.frontends("inductor")
@pytest.mark.parametrize(("case", "new", "slots"), [CASES[0], CASES[9]], ids=str)
def test_inductor(
    frontend: Frontend, rng: np.random.Generator, case: Case, new: str, slots: str | None
) -> None:
    check(frontend, ragged_paged_attention_arguments(rng, case, new, slots))


# --- it is the two other operations ---------------------------------------------------------------------------------


def in_two_calls(frontend: Frontend, arguments: Arguments) -> tuple[Any, ...]:
    """A write with explicit slots, then attention."""
    rest = dict(arguments)
    key, value, mapping = (rest.pop(name, None) for name in ("key", "value", "slot_mapping"))
    if mapping is None:
        names = ("context_lens", "block_tables", "query_start_loc", "num_seqs")
        view, _ = reference.kv_views(arguments["layout"], *caches_of(arguments))
        mapping = reference.slots_of_new_tokens(len(key), *view.shape[:2], *(rest[name] for name in names))
    shared = ("layout", "kv_cache_dtype", "k_scale", "v_scale")
    write = {"key": key, "value": value, "slot_mapping": mapping.astype(np.int32)}
    write |= {name: rest[name] for name in shared if name in rest}
    cache: Any
    if isinstance(rest["kv_cache"], tuple):
        k, v = rest["kv_cache"]
        cache = frontend.reshape_and_cache_flash(**write, key_cache=k, value_cache=v)
    else:
        cache = frontend.reshape_and_cache(**write, kv_cache=rest["kv_cache"])
    return *frontend.paged_attention(**rest | {"kv_cache": cache}), cache


def check_two_calls(frontend: Frontend, arguments: Arguments) -> None:
    out, lse, cache = frontend.ragged_paged_attention(**arguments)
    expected_out, expected_lse, expected_cache = in_two_calls(frontend, arguments)
    assert_same_bits(out, expected_out, "out")
    if lse is not None:
        assert_same_bits(lse, expected_lse, "lse")
    assert_caches(cache, expected_cache)


@pytest.mark.frontends("torch")
@pytest.mark.parametrize(("case", "new", "slots"), CASES, ids=str)
def test_it_is_a_write_and_attention(
    frontend: Frontend, rng: np.random.Generator, case: Case, new: str, slots: str | None
) -> None:
    check_two_calls(frontend, ragged_paged_attention_arguments(rng, case, new, slots))


@pytest.mark.frontends("lazy", "openxla", "jax", "jax_jit")
@pytest.mark.parametrize(("case", "new", "slots"), [CASES[0], CASES[9]], ids=str)
def test_it_is_a_write_and_attention_in_xla(
    frontend: Frontend, rng: np.random.Generator, case: Case, new: str, slots: str | None
) -> None:
    check_two_calls(frontend, ragged_paged_attention_arguments(rng, case, new, slots))


def test_scales_may_be_numbers(frontend: Frontend, rng: np.random.Generator) -> None:
    case = Case(MIXED, layout="interleaved", page=16, dtype="bf16", cache="u8:e4m3")
    arguments = ragged_paged_attention_arguments(rng, case, "bf16")
    check(frontend, arguments | {"k_scale": 0.5, "v_scale": 0.25})


@pytest.mark.frontends("torch", "jax")
def test_pair_means_nhd(frontend: Frontend, rng: np.random.Generator) -> None:
    arguments = ragged_paged_attention_arguments(rng, CASES[0][0])
    del arguments["layout"]
    check(frontend, arguments)


@pytest.mark.frontends("torch", "jax")
@pytest.mark.parametrize("slots", [None, "i32"])
def test_no_token_and_no_sequence(frontend: Frontend, rng: np.random.Generator, slots: str | None) -> None:
    empty = Case(((0, 3), (0, 0)), layout="NHD", page=8)
    check(frontend, ragged_paged_attention_arguments(rng, empty, "same", slots))
    arguments = ragged_paged_attention_arguments(rng, Case(MIXED, layout="NHD", page=8))
    check(frontend, arguments | {"num_seqs": np.array([0], np.int32)})


# --- tokens without a place -----------------------------------------------------------------------------------------

CASE = Case(MIXED, layout="NHD", page=8, pad_tokens=2, pad_seqs=1)
ROOM = (-(-33 // 8) + 1) * 8  # of a row of the block table
# argument, entry, value, which tokens are then not written
NOWHERE: list[tuple[str, tuple[int, ...], int, list[int]]] = [
    ("block_tables", (0, 4), -1, [0]),
    ("block_tables", (1, 1), 10_000, [1, 2, 3]),  # positions 13 to 15 of 13 to 17
    ("block_tables", (1, 2), 2**31 - 1, [4, 5]),
    ("block_tables", (2, 0), -(2**31), list(range(6, 14))),
    ("context_lens", (1,), ROOM + 2, [4, 5]),
    ("context_lens", (1,), ROOM + 5, [1, 2, 3, 4, 5]),
    ("context_lens", (1,), 2**31 - 1, [1, 2, 3, 4, 5]),
    ("context_lens", (1,), 3, [1, 2]),  # positions -2 to 2
    ("context_lens", (1,), 0, [1, 2, 3, 4, 5]),
    ("context_lens", (1,), -1, [1, 2, 3, 4, 5]),
    ("query_start_loc", (1,), 10_000, [0, 1, 2, 3, 4, 5]),
    ("query_start_loc", (4,), -5, [15, 16, 17, 18]),
    ("num_seqs", (0,), 2, list(range(6, 19))),
    ("num_seqs", (0,), -7, list(range(19))),
]


@pytest.mark.frontends("torch", "lazy", "jax_jit")
@pytest.mark.parametrize(("argument", "entry", "value", "missing"), NOWHERE, ids=str)
def test_tokens_without_a_place(
    frontend: Frontend,
    rng: np.random.Generator,
    argument: str,
    entry: tuple[int, ...],
    value: int,
    missing: list[int],
) -> None:
    """They are not written, nor is anything else; the other tokens are."""
    arguments = without_poison(rng, ragged_paged_attention_arguments(rng, CASE))
    arguments[argument][entry] = value
    names = ("context_lens", "block_tables", "query_start_loc", "num_seqs")
    blocks = len(arguments["kv_cache"][0])
    slots = reference.slots_of_new_tokens(21, blocks, 8, *(arguments[name] for name in names))
    real = slots[:19]
    assert np.flatnonzero(real < 0).tolist() == missing  # the table says what the reference does
    assert len(set(slots[slots >= 0])) == np.sum(slots >= 0)
    check(frontend, arguments)


HOSTILE = {
    "i32": [-(2**31), -1, 2**31 - 1],
    "i64": [-(2**63), -1, 2**31, 2**32 + 3, 2**63 - 1],
}


@pytest.mark.frontends("torch", "lazy", "jax_jit")
@pytest.mark.parametrize("slots", HOSTILE)
def test_hostile_slots(frontend: Frontend, rng: np.random.Generator, slots: str) -> None:
    arguments = without_poison(rng, ragged_paged_attention_arguments(rng, CASE, "same", slots))
    outside = len(arguments["kv_cache"][0]) * 8
    hostile = [*HOSTILE[slots], outside, outside + 1]
    arguments["slot_mapping"][rng.permutation(19)[: len(hostile)]] = hostile
    check(frontend, arguments)


@pytest.mark.frontends("torch", "jax")
def test_slots_elsewhere(frontend: Frontend, rng: np.random.Generator) -> None:
    """slot_mapping alone says where tokens go: on pages of nobody, and for tokens of no sequence too."""
    arguments = without_poison(rng, ragged_paged_attention_arguments(rng, CASE, "same", "i32"))
    blocks = len(arguments["kv_cache"][0])
    arguments["slot_mapping"] = rng.permutation(blocks * 8)[:21].astype(np.int32)
    check(frontend, arguments)


# --- what the call returns and updates ------------------------------------------------------------------------------


@pytest.mark.frontends("torch", "lazy")
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "stacked"])
def test_torch_updates_in_place(
    frontend: TorchFrontend, rng: np.random.Generator, layout: str, lse: bool
) -> None:
    """The very tensors that were given, whose versions autograd sees."""
    case = Case(MIXED, layout=layout, page=8, lse=lse)
    arguments = ragged_paged_attention_arguments(rng, case)
    tensors = {name: map_arrays(frontend.tensor, value) for name, value in arguments.items()}
    caches = caches_of(tensors)
    versions = [cache._version for cache in caches]
    result = frontend.fx.ragged_paged_attention(**tensors)
    assert isinstance(result, tuple) == lse
    if lse:
        assert len(result) == 2 and result[1].shape == (4, 19)
    assert [cache._version for cache in caches] == [version + 1 for version in versions]
    _, _, expected = reference.ragged_paged_attention(**arguments)
    assert_caches(tuple(map(frontend.array, caches)), caches_of({"kv_cache": expected}))


@pytest.mark.frontends("torch", "lazy")
def test_autograd_refuses_an_old_cache(frontend: TorchFrontend, rng: np.random.Generator) -> None:
    arguments = without_poison(rng, ragged_paged_attention_arguments(rng, CASE))
    tensors = {name: map_arrays(frontend.tensor, value) for name, value in arguments.items()}
    for cache in tensors["kv_cache"]:
        weight = frontend.torch.ones_like(cache).requires_grad_()
        product = (weight * cache).sum()
        frontend.fx.ragged_paged_attention(**tensors)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


@pytest.mark.frontends("torch")
def test_inference_tensors(frontend: TorchFrontend, rng: np.random.Generator) -> None:
    """They have no version to bump."""
    with frontend.torch.inference_mode():
        check(frontend, ragged_paged_attention_arguments(rng, CASE))


@pytest.mark.frontends("jax", "jax_jit")
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("form", ["tuple", "list", "array"])
def test_jax_returns_the_cache_as_given(
    frontend: JaxFrontend, rng: np.random.Generator, form: str, lse: bool
) -> None:
    """(out, kv_cache) or (out, lse, kv_cache); a pair comes back in its own type. The arguments stay as they are."""
    jax = frontend.jax
    case = Case(MIXED, layout="interleaved" if form == "array" else "NHD", page=8, lse=lse)
    arguments = ragged_paged_attention_arguments(rng, case)
    arrays = {
        name: map_arrays(jax.numpy.asarray, value) for name, value in arguments.items() if has_arrays(value)
    }
    scalars = {name: value for name, value in arguments.items() if name not in arrays}
    if form == "list":
        arrays["kv_cache"] = list(arrays["kv_cache"])

    def function(arrays: dict[str, Any]) -> Any:
        return frontend.fx.ragged_paged_attention(**arrays, **scalars)

    result = (jax.jit(function) if frontend.name == "jax_jit" else function)(arrays)
    assert isinstance(result, tuple) and len(result) == (3 if lse else 2)
    assert isinstance(result[-1], {"tuple": tuple, "list": list, "array": jax.Array}[form])
    expected_out, expected_lse, expected_cache = reference.ragged_paged_attention(**arguments)
    out, *rest = (np.asarray(x) for x in result[:-1])
    assert_attention(out, rest[0] if rest else None, (expected_out, expected_lse), out.dtype)
    cache = result[-1] if form == "array" else tuple(result[-1])
    assert_caches(jax.tree.map(np.asarray, cache), expected_cache)
    before = arrays["kv_cache"] if form == "array" else tuple(arrays["kv_cache"])
    assert_caches(jax.tree.map(np.asarray, before), arguments["kv_cache"])


def test_a_step_after_another(frontend: Frontend, rng: np.random.Generator) -> None:
    """Decoding: each step sees the tokens of those before it, which no other call has written."""
    case = Case(((3, 3), (1, 20)), layout="HND", page=8, dtype="bf16")
    arguments = ragged_paged_attention_arguments(rng, case)
    for _ in range(2):
        out, lse, cache = frontend.ragged_paged_attention(**arguments)
        expected_out, expected_lse, expected_cache = reference.ragged_paged_attention(**arguments)
        assert_caches(cache, expected_cache)
        assert_attention(out, lse, (expected_out, expected_lse), arguments["query"].dtype)
        again = ragged_paged_attention_arguments(rng, Case(((1, 1), (1, 1)), page=8, dtype="bf16"))
        tokens = {name: again[name] for name in ("query", "key", "value", "query_start_loc")}
        arguments |= tokens | {"kv_cache": cache, "context_lens": arguments["context_lens"] + np.int32(1)}


def test_positions_of_the_batches(rng: np.random.Generator) -> None:
    """The slots that the cases are made with are those of the reference."""
    case = Case(SPARSE, layout="NHD", page=8, pad_tokens=2)
    arguments = ragged_paged_attention_arguments(rng, case, "same", "i32")
    names = ("context_lens", "block_tables", "query_start_loc", "num_seqs")
    blocks = len(arguments["kv_cache"][0])
    slots = reference.slots_of_new_tokens(12, blocks, 8, *(arguments[name] for name in names))
    np.testing.assert_array_equal(arguments["slot_mapping"], slots)
    assert [token for token, _, _ in positions(case, arguments)] == np.flatnonzero(slots >= 0).tolist()
