"""Every engine of the CUDA library that computes gradients, in the cases that it is for.

They are right, `explain` says that the engine served, and with `deterministic` they are the same bits each time. On a
CPU the same cases meet the kernels there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from flashxla.ops.flash_attn_varlen_backward import FLASH_ATTN_VARLEN_BACKWARD
from flashxla.ops.op import Call, Op
from tests.batches import Arguments, Case, flash_attn_arguments
from tests.checks import assert_gradients, assert_same_bits
from tests.conftest import WITH_AUTOGRAD
from tests.expanded import expanded
from tests.frontends import Frontend, TorchFrontend, has_arrays, map_arrays
from tests.gradients import SOURCES, cotangents, gradients_from
from tests.ops.engines import differentiated_by

# Tiles have 64 rows and 128 keys.
LONG = ((260, 300), (64, 500), (129, 129))
ODD = ((100, 30), (60, 0), (0, 9), (47, 47), (128, 128), (1, 40))
MANY = tuple((n, n) for n in (1, 2, 63, 64, 65, 5, 127, 128, 129, 3, 300))

ENGINES = [
    # wide
    *((Case(LONG, dim=dim, dtype="bf16"), "wide") for dim in (64, 80, 96, 128, 136, 192, 256)),
    *((Case(MANY, dim=dim, dtype="f16", heads=(4, 4)), "wide") for dim in (64, 128, 256)),
    (Case(ODD, dim=128, dtype="bf16", pad_tokens=5, pad_seqs=2), "wide"),
    (Case(LONG, dim=128, dtype="bf16", heads=(8, 1), used=True), "wide"),
    (Case(LONG, dim=64, dtype="bf16", heads=(6, 2), causal=False), "wide"),
    (Case(LONG, dim=128, dtype="bf16", window=(100, -1)), "wide"),
    (Case(LONG, dim=64, dtype="f16", window=(17, 130), causal=False), "wide"),
    (Case(LONG, dim=128, dtype="bf16", window=(0, 0), causal=False, sinks="f32"), "wide"),
    (Case(LONG, dim=128, dtype="bf16", softcap=3.0, sinks="bf16"), "wide"),
    (Case(ODD, dim=256, dtype="bf16", pad_tokens=5, pad_seqs=2, leftpad=True), "wide"),
    (Case(LONG, dim=256, dtype="f16", window=(17, 130), causal=False, sinks="f16", softcap=3.0), "wide"),
    (Case(LONG, dim=128, dtype="f16", leftpad=True, scale=-0.1), "wide"),
    (Case(MANY, dim=128, dtype="bf16", lse=False), "wide"),
    *((Case(LONG, dim=dim, dtype="bf16", alibi="SH"), "wide") for dim in (64, 136, 192, 256)),
    (Case(MANY, dim=256, dtype="f16", heads=(4, 4), alibi="H"), "wide"),
    (Case(LONG, dim=128, dtype="bf16", alibi="SH", softcap=5.0), "wide"),
    (Case(LONG, dim=128, dtype="f16", alibi="SH", causal=False, used=True, leftpad=True), "wide"),
    (Case(LONG, dim=192, v_dim=128, dtype="bf16", heads=(2, 2)), "wide"),
    (Case(MANY, dim=136, v_dim=8, dtype="f16", alibi="H", softcap=5.0), "wide"),
    (Case(ODD, dim=192, v_dim=104, dtype="bf16", pad_tokens=5, pad_seqs=2, sinks="f32"), "wide"),
    (Case(LONG, dim=40, v_dim=72, dtype="bf16"), "wide"),
    (Case(MANY, dim=128, v_dim=8, dtype="f16"), "wide"),
    (Case(ODD, dim=256, v_dim=248, dtype="bf16", pad_tokens=5, pad_seqs=2, leftpad=True), "wide"),
    (Case(LONG, dim=256, v_dim=64, dtype="f16", window=(17, 130), causal=False, sinks="f16"), "wide"),
    (Case(LONG, dim=64, v_dim=256, dtype="bf16", heads=(6, 2)), "wide"),
    # wide, on copies of tensors whose heads are no multiple of 16 bytes
    *((Case(LONG, dim=dim, dtype="bf16"), "wide") for dim in (46, 60, 99, 100, 250)),
    *((Case(MANY, dim=dim, dtype="f16", heads=(4, 4)), "wide") for dim in (30, 60, 250)),
    (Case(LONG, dim=36, v_dim=100, dtype="bf16", heads=(8, 1), used=True), "wide"),
    (Case(LONG, dim=128, v_dim=100, dtype="f16", window=(17, 130), causal=False), "wide"),
    (Case(LONG, dim=99, v_dim=64, dtype="bf16", window=(100, -1), sinks="bf16"), "wide"),
    (Case(LONG, dim=100, dtype="bf16", alibi="SH", softcap=5.0, scale=-0.1), "wide"),
    (Case(MANY, dim=60, dtype="bf16", softcap=3.0, sinks="f32", lse=False), "wide"),
    (Case(ODD, dim=100, dtype="f16", pad_tokens=5, pad_seqs=2, leftpad=True, sinks="f16"), "wide"),
    (Case(ODD, dim=250, v_dim=99, dtype="bf16", pad_tokens=5, pad_seqs=2), "wide"),
    # tile32
    *((Case(LONG, dim=dim, heads=(4, 2)), "tile32") for dim in (4, 20, 64, 96, 128, 136, 256)),
    (Case(MANY, dim=64, heads=(4, 4)), "tile32"),
    (Case(MANY, dim=128, alibi="SH", lse=False), "tile32"),
    (Case(ODD, dim=128, pad_tokens=5, pad_seqs=2, sinks="f32"), "tile32"),
    (Case(ODD, dim=256, v_dim=12, pad_tokens=5, pad_seqs=2, leftpad=True), "tile32"),
    (Case(LONG, dim=40, v_dim=72, softcap=3.0, used=True), "tile32"),
    (Case(LONG, dim=64, window=(17, 130), causal=False, scale=-0.1), "tile32"),
    # tile32, on such copies
    *((Case(LONG, dim=dim, heads=(4, 2)), "tile32") for dim in (30, 46, 99, 250)),
    (Case(LONG, dim=128, v_dim=99, heads=(8, 1), alibi="SH", lse=False), "tile32"),
    (Case(MANY, dim=30, v_dim=99, window=(100, -1), softcap=3.0), "tile32"),
    (Case(ODD, dim=99, pad_tokens=5, pad_seqs=2, leftpad=True, sinks="f32"), "tile32"),
    # general
    (Case(ODD, dim=264, v_dim=64, pad_tokens=5, pad_seqs=2, sinks="f32", heads=(2, 1)), "general"),
    (Case(LONG, dim=301, v_dim=99, heads=(2, 1)), "general"),
    (Case(LONG, dim=46, v_dim=258, dtype="bf16", heads=(2, 1)), "general"),
    (Case(((90, 150), (64, 64)), dim=576, v_dim=512, dtype="bf16", heads=(2, 1)), "general"),
    (Case(((90, 150), (64, 64)), dim=320, dtype="f16", heads=(2, 1), leftpad=True), "general"),
]
# Where all KV heads are one in memory, as expanded tensors are: TMA does not take that, but copies have all heads.
EXPANDED = [
    *((Case(LONG, dim=dim, dtype="bf16"), "tile") for dim in (64, 136, 192, 256)),
    (Case(MANY, dim=256, dtype="f16", heads=(8, 4), alibi="SH"), "tile"),
    (Case(LONG, dim=192, v_dim=128, dtype="bf16", heads=(2, 2)), "tile"),
    (Case(LONG, dim=128, dtype="bf16", alibi="SH", softcap=5.0), "tile"),
    (Case(ODD, dim=256, v_dim=248, dtype="bf16", pad_tokens=5, pad_seqs=2, leftpad=True), "tile"),
    (Case(LONG, dim=256, v_dim=64, dtype="f16", window=(17, 130), causal=False, sinks="f16"), "tile"),
    (Case(LONG, dim=100, dtype="bf16"), "wide"),
    (Case(ODD, dim=36, v_dim=99, dtype="f16", pad_tokens=5, pad_seqs=2, sinks="f32"), "wide"),
]
SAME_BITS = [
    Case(LONG, dim=128, dtype="bf16", heads=(8, 2)),
    Case(MANY, dim=64, dtype="f16", sinks="f32"),
    Case(LONG, dim=256, dtype="bf16", window=(100, -1)),
    Case(LONG, dim=192, v_dim=128, dtype="bf16", alibi="SH"),
    Case(LONG, dim=64, sinks="f32"),
    Case(LONG, dim=256, v_dim=128),
    Case(LONG, dim=100, dtype="bf16", heads=(8, 2)),
    Case(MANY, dim=36, v_dim=99, dtype="f16", sinks="f32"),
    Case(LONG, dim=99, window=(100, -1)),
    Case(((300, 300), (64, 64)), dim=320, dtype="bf16", heads=(2, 1)),
]


def wanted_of(arguments: Arguments) -> tuple[str, ...]:
    return tuple(name for name in SOURCES if name in arguments)


def check(frontend: Frontend, arguments: Arguments, grads: tuple[np.ndarray, ...]) -> dict[str, np.ndarray]:
    """Hold a call's gradients against float64; returns them."""
    wanted = wanted_of(arguments)
    got = frontend.gradients("flash_attn_varlen_func", arguments, wanted, grads)
    out, _ = frontend.flash_attn_varlen_func(**arguments)
    expected = gradients_from(arguments, out, *grads)
    for name in wanted:
        assert_gradients(got[name], expected[name], arguments["q"].dtype, name, frontend.device)
    return got


@pytest.mark.frontends("torch")
@pytest.mark.parametrize(("case", "engine"), ENGINES, ids=str)
def test_engine(frontend: Frontend, rng: np.random.Generator, case: Case, engine: str) -> None:
    arguments = flash_attn_arguments(rng, case)
    if (served := differentiated_by(frontend, arguments)) is not None:
        assert served == engine
    check(frontend, arguments, cotangents(rng, arguments))


@pytest.mark.frontends("torch")
@pytest.mark.parametrize(("case", "engine"), EXPANDED, ids=str)
def test_expanded_heads(frontend: Frontend, rng: np.random.Generator, case: Case, engine: str) -> None:
    arguments = flash_attn_arguments(rng, case)
    name = rng.choice(["k", "v"])
    arguments[name] = expanded(arguments[name])
    if (served := differentiated_by(frontend, arguments)) is not None:
        assert served == engine
    check(frontend, arguments, cotangents(rng, arguments))


@pytest.mark.frontends("torch", "jax_jit")
@pytest.mark.parametrize("case", SAME_BITS, ids=str)
def test_same_bits_each_time(frontend: Frontend, rng: np.random.Generator, case: Case) -> None:
    arguments = flash_attn_arguments(rng, case) | {"deterministic": True}
    grads = cotangents(rng, arguments)
    first = check(frontend, arguments, grads)
    for _ in range(5):
        again = frontend.gradients("flash_attn_varlen_func", arguments, wanted_of(arguments), grads)
        for name, array in first.items():
            assert_same_bits(again[name], array, name)


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("case", SAME_BITS, ids=str)
def test_same_bits_of_keys_and_values(frontend: Frontend, rng: np.random.Generator, case: Case) -> None:
    """Also of calls that did not ask for that."""
    arguments = flash_attn_arguments(rng, case)
    grads = cotangents(rng, arguments)
    wanted = tuple(name for name in wanted_of(arguments) if name != "q")
    first, *others = (
        frontend.gradients("flash_attn_varlen_func", arguments, wanted, grads) for _ in range(4)
    )
    for again in others:
        for name in wanted:
            assert_same_bits(again[name], first[name], name)


@WITH_AUTOGRAD
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("function", ["flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func"])
def test_deterministic_arrives(
    frontend: Frontend,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    deterministic: bool,
) -> None:
    """In the native call, from every front end."""
    arrived: list[Any] = []
    resolve = Op.resolve

    def noting(op: Op, tensors: Any, scalars: Any) -> Call:
        call = resolve(op, tensors, scalars)
        if op is FLASH_ATTN_VARLEN_BACKWARD:
            arrived.append(dict(call.attributes)["deterministic"])
        return call

    monkeypatch.setattr(Op, "resolve", noting)
    arguments = flash_attn_arguments(rng, Case(((9, 9),), lse=False))
    names = {"q", "k", "v", "max_seqlen_q", "cu_seqlens_q", "max_seqlen_k", "cu_seqlens_k"}
    given = {name: arguments[name] for name in names}
    if function == "flash_attn_varlen_kvpacked_func":
        given["kv"] = np.stack([given.pop(name) for name in "kv"], 1)
    given |= {"deterministic": deterministic, "softmax_scale": float(rng.random())}  # no call that is kept
    frontend.gradients(function, given, ("q",), cotangents(rng, arguments))
    assert arrived and set(arrived) == {int(deterministic)}


# Offsets and lengths with which sequences have keys in common.
SHARED = {
    "small": (((9, 20), (12, 20), (7, 20)), (0, 10, 15, 40), (30, 20, 25)),
    "several tiles": (
        ((90, 200), (150, 260), (70, 100), (129, 150)),
        (0, 128, 300, 560, 710),
        (250, 300, 260, 150),
    ),
    "the same keys": (((64, 200), (100, 200), (3, 7)), (0, 0, 200, 407), (200, 207, 100)),
    "one of them alone": (((130, 150), (140, 300), (200, 260)), (0, 150, 450, 710), (150, 400, 260)),
}


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("dtype", "dim"), [("bf16", 128), ("f16", 64), ("bf16", 256), ("f16", 100), ("f32", 64)]
)
@pytest.mark.parametrize("name", SHARED)
def test_keys_of_several_sequences(
    frontend: Frontend, rng: np.random.Generator, name: str, dtype: str, dim: int, deterministic: bool
) -> None:
    """Offsets may let sequences overlap: the gradients of their common keys are the sums."""
    lens, starts, used = SHARED[name]
    case = Case(lens, dtype=dtype, dim=dim, causal=bool(rng.integers(2)), sinks="f32")
    arguments = flash_attn_arguments(rng, case) | {"deterministic": deterministic}
    arguments["cu_seqlens_k"] = np.array(starts, np.int32)
    arguments["seqused_k"] = np.array(used, np.int32)
    arguments["max_seqlen_k"] = max(used)
    grads = cotangents(rng, arguments)
    first = check(frontend, arguments, grads)
    if deterministic:
        again = frontend.gradients("flash_attn_varlen_func", arguments, wanted_of(arguments), grads)
        for source, array in first.items():
            assert_same_bits(again[source], array, source)


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", SAME_BITS, ids=str)
def test_poison_outside_of_sequences(
    frontend: TorchFrontend, rng: np.random.Generator, case: Case, deterministic: bool
) -> None:
    """What rows in no sequence hold does not matter, in out and the LSE neither; their gradients are 0."""
    case = dataclasses.replace(case, pad_tokens=70, used=True, pad_seqs=1)
    arguments = flash_attn_arguments(rng, case) | {"deterministic": deterministic}
    grad_out, grad_lse = cotangents(rng, arguments)
    out, lse = frontend.flash_attn_varlen_func(**arguments)
    assert lse is not None
    out, lse = out.copy(), lse.copy()
    tokens = sum(queries for queries, _ in case.lens)
    out[tokens:], lse[:, tokens:] = np.nan, np.nan
    assert np.isnan(grad_out[tokens:].astype(np.float32)).all()
    assert np.isnan(grad_lse[:, tokens:]).all()

    left, right = arguments["window_size"]
    values = arguments | {"grad_out": grad_out, "grad_softmax_lse": grad_lse, "out": out, "softmax_lse": lse}
    values |= {"window_left": left, "window_right": right}
    given = {
        name: map_arrays(frontend.tensor, values[name]) if has_arrays(values[name]) else values[name]
        for name in FLASH_ATTN_VARLEN_BACKWARD.names
        if name in values
    }
    results = frontend.torch.ops.flashxla.flash_attn_varlen_backward(**given)
    got = dict(zip(SOURCES, map(frontend.array, results), strict=True))
    expected = gradients_from(arguments, np.nan_to_num(out), np.nan_to_num(grad_out), np.nan_to_num(grad_lse))
    for name in wanted_of(arguments):
        assert_gradients(got[name], expected[name], arguments["q"].dtype, name, frontend.device)
    assert not got["q"][tokens:].any()
    for name in "kv":
        assert not got[name][np.isnan(arguments[name][:, 0, 0].astype(np.float32))].any()


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_one_long_sequence(frontend: Frontend, rng: np.random.Generator, dtype: str) -> None:
    """Many tiles of keys add to the same gradients of queries."""
    arguments = flash_attn_arguments(rng, Case(((1500, 1500),), dtype=dtype, heads=(2, 1), lse=False))
    grads = cotangents(rng, arguments)
    got = frontend.gradients("flash_attn_varlen_func", arguments, ("q", "k", "v"), grads)
    out, _ = frontend.flash_attn_varlen_func(**arguments)
    expected = gradients_from(arguments, out, *grads)
    for name in "qkv":
        assert_gradients(got[name], expected[name], arguments["q"].dtype, name, frontend.device)
