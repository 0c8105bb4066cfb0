"""Gradients of flash_attn_varlen_func: every argument, in every front end, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.batches import Case, flash_attn_arguments
from tests.checks import DTYPES, assert_gradients, assert_same_bits
from tests.conftest import WITH_AUTOGRAD
from tests.frontends import Frontend, JaxFrontend, TorchFrontend
from tests.gradients import SOURCES, cotangents, flash_attn_varlen_gradients, gradients_from
from tests.ops.test_flash_attn_varlen import ALL as EVERYTHING
from tests.ops.test_flash_attn_varlen import MIXED, SPARSE

LONG = ((150, 150), (70, 300), (260, 130))  # several tiles of keys and blocks of rows
ALL = {**EVERYTHING, "descale": None}  # which has no gradient

CASES = [
    # dtypes
    Case(MIXED),
    Case(MIXED, dtype="bf16"),
    Case(MIXED, dtype="f16"),
    Case(MIXED, causal=False),
    Case(MIXED, lse=False),
    # head sizes and groups
    Case(MIXED, dim=1, heads=(1, 1)),
    Case(MIXED, dim=40, heads=(3, 3)),
    Case(MIXED, dim=46, heads=(8, 1)),
    Case(MIXED, dim=96, heads=(6, 2), dtype="bf16"),
    Case(MIXED, dim=256, heads=(2, 1)),
    Case(MIXED, dim=192, v_dim=128, dtype="f16"),
    Case(MIXED, dim=40, v_dim=72, causal=False),
    Case(MIXED, dim=576, v_dim=512, heads=(2, 1)),
    # masks
    Case(MIXED, window=(4, -1)),
    Case(MIXED, window=(-1, 3), causal=False),
    Case(MIXED, window=(2, 3), causal=False),
    Case(MIXED, leftpad=True),
    Case(MIXED, leftpad=True, causal=False),
    # scores
    Case(MIXED, softcap=2.0),
    Case(MIXED, alibi="SH", causal=False),
    Case(MIXED, alibi="H", softcap=5.0, window=(6, -1)),
    Case(MIXED, sinks="f32"),
    Case(MIXED, sinks="bf16", dtype="bf16", window=(7, -1)),
    Case(SPARSE, sinks="f16"),
    Case(MIXED, scale=-0.3),
    Case(MIXED, scale=0.0),
    # batches
    Case(SPARSE),
    Case(LONG),
    Case(LONG, dtype="bf16", heads=(4, 1), dim=128),
    Case(LONG, window=(37, 20), causal=False, softcap=4.0, alibi="H", sinks="f32"),
    Case(MIXED, pad_tokens=5),
    Case(MIXED, pad_seqs=0, sinks="f32"),
    Case(MIXED, used=True),
    Case(MIXED, used=True, leftpad=True, pad_seqs=2, pad_tokens=3, dtype="bf16"),
    # everything at once
    Case(MIXED, dim=72, causal=False, window=(9, 4), used=True, **ALL),
    Case(LONG, dim=40, v_dim=72, dtype="f16", window=(99, -1), **ALL),
]
COMPILED = [CASES[0], Case(MIXED, dtype="bf16", dim=40, v_dim=72, window=(9, -1), **ALL)]


def check(frontend: Frontend, rng: np.random.Generator, case: Case) -> None:
    arguments = flash_attn_arguments(rng, case)
    wanted = tuple(name for name in SOURCES if name in arguments)
    grads = cotangents(rng, arguments)
    got = frontend.gradients("flash_attn_varlen_func", arguments, wanted, grads)
    out, _ = frontend.flash_attn_varlen_func(**arguments)
    expected = gradients_from(arguments, out, *grads)
    for name in wanted:
        assert got[name].dtype == arguments[name].dtype
        assert_gradients(got[name], expected[name], arguments["q"].dtype, name, frontend.device)


@WITH_AUTOGRAD
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(frontend: Frontend, rng: np.random.Generator, case: Case) -> None:
    check(frontend, rng, case)


@pytest.mark.frontends("inductor")
@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_inductor(frontend: Frontend, rng: np.random.Generator, case: Case) -> None:
    check(frontend, rng, case)


@WITH_AUTOGRAD
@pytest.mark.parametrize("wanted", [("q",), ("v",), ("k", "v"), ("s_aux",)], ids=str)
def test_some_gradients(frontend: Frontend, rng: np.random.Generator, wanted: tuple[str, ...]) -> None:
    arguments = flash_attn_arguments(rng, Case(MIXED, sinks="f32"))
    grads = cotangents(rng, arguments)
    got = frontend.gradients("flash_attn_varlen_func", arguments, wanted, grads)
    expected = flash_attn_varlen_gradients(arguments, *grads)
    for name in wanted:
        assert_gradients(got[name], expected[name], arguments["q"].dtype, name, frontend.device)


@WITH_AUTOGRAD
def test_gradient_of_the_lse_alone(frontend: Frontend, rng: np.random.Generator) -> None:
    """As z-loss needs it."""
    arguments = flash_attn_arguments(rng, Case(MIXED, sinks="f32"))
    grad_out, grad_lse = cotangents(rng, arguments)
    got = frontend.gradients("flash_attn_varlen_func", arguments, SOURCES, (None, grad_lse))
    expected = flash_attn_varlen_gradients(arguments, np.zeros_like(grad_out), grad_lse)
    for name in SOURCES:
        assert_gradients(got[name], expected[name], arguments["q"].dtype, name, frontend.device)


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("dim", [64, 128])
def test_as_exact_as_sdpa(frontend: TorchFrontend, rng: np.random.Generator, dtype: str, dim: int) -> None:
    """gradcheck needs float64, which the operations have not: errors are held against torch SDPA's own.

    In float32 both are roundings of the weights' exponents. The kernels' exponents have one rounding more, to base 2:
    that is 1.5 times SDPA's error on average at the smallest head size. On a GPU both round weights to 16 bits.
    """
    arguments = flash_attn_arguments(rng, Case(((200, 200),), dim=dim, dtype=dtype, lse=False))
    (grad,) = cotangents(rng, arguments)
    expected = flash_attn_varlen_gradients(arguments, grad)
    got = frontend.gradients("flash_attn_varlen_func", arguments, ("q", "k", "v"), (grad,))
    q, k, v, g = (frontend.tensor(x).transpose(0, 1)[None] for x in (*(arguments[n] for n in "qkv"), grad))
    for x in (q, k, v):
        x.requires_grad_()
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    theirs = torch.autograd.grad(out, (q, k, v), g)
    for name, their in zip("qkv", theirs, strict=True):
        error = np.abs(got[name].astype(np.float64) - expected[name]).mean()
        their_error = np.abs(
            frontend.array(their[0].transpose(0, 1)).astype(np.float64) - expected[name]
        ).mean()
        allowed = 1.5 if dtype != "f32" and frontend.device == "cpu" else 2.0
        assert error <= allowed * their_error, (name, error, their_error)


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("case", [CASES[0], CASES[-1]], ids=str)
def test_same_bits_twice(frontend: Frontend, rng: np.random.Generator, case: Case) -> None:
    """On a CPU also of calls that did not ask for that."""
    arguments = flash_attn_arguments(rng, case) | {"deterministic": frontend.device != "cpu"}
    grads = cotangents(rng, arguments)
    first, second = (
        frontend.gradients("flash_attn_varlen_func", arguments, ("q", "k", "v"), grads) for _ in "12"
    )
    for name in "qkv":
        assert_same_bits(second[name], first[name], name)


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("dim", [16, 30, 128, 256])
def test_values_that_are_not_seen_may_be_anything(
    frontend: Frontend, rng: np.random.Generator, dim: int
) -> None:
    """0 times infinity is not 0: gradients of queries have nothing of the keys that these do not see."""
    arguments = flash_attn_arguments(rng, Case(((40, 40),), lse=False, dim=dim))
    clean = {name: array.copy() for name, array in arguments.items() if isinstance(array, np.ndarray)}
    (grad,) = cotangents(rng, arguments)
    for name in "qkv":
        arguments[name][30:] = np.inf if name == "k" else np.nan
    grad[30:] = np.nan
    got = frontend.gradients("flash_attn_varlen_func", arguments, ("q", "k", "v"), (grad,))
    short = {**arguments, **clean, "cu_seqlens_q": np.array([0, 30], np.int32)}
    short["cu_seqlens_k"] = short["cu_seqlens_q"]
    expected = flash_attn_varlen_gradients(short, np.nan_to_num(grad))
    assert_gradients(got["q"][:30], expected["q"][:30], DTYPES["f32"], "q", frontend.device)


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("dim", [16, 30, 128, 256])
def test_queries_that_do_not_see_may_be_anything(
    frontend: Frontend, rng: np.random.Generator, dim: int
) -> None:
    """Gradients of keys and values have nothing of the queries that do not see them."""
    arguments = flash_attn_arguments(rng, Case(((40, 40),), lse=False, dim=dim))
    (grad,) = cotangents(rng, arguments)
    expected = flash_attn_varlen_gradients(arguments, np.where(np.arange(40)[:, None, None] < 10, 0, grad))
    arguments["q"][:10], grad[:10] = np.nan, np.inf
    got = frontend.gradients("flash_attn_varlen_func", arguments, ("k", "v"), (grad,))
    for name in "kv":
        assert_gradients(got[name][10:], expected[name][10:], DTYPES["f32"], name, frontend.device)


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("lens", [((700, 900), (30, 500)), ((900, 900),)], ids=str)
def test_sequences_that_threads_share(frontend: TorchFrontend, rng: np.random.Generator, lens: Any) -> None:
    """With more threads than sequences, several tasks add to the same keys, and the bits stay the same."""
    arguments = flash_attn_arguments(rng, Case(lens, heads=(2, 1), sinks="f32"))
    arguments["deterministic"] = frontend.device != "cpu"
    grads = cotangents(rng, arguments)
    threads = frontend.torch.get_num_threads()
    try:
        frontend.torch.set_num_threads(16)
        got, again = (frontend.gradients("flash_attn_varlen_func", arguments, SOURCES, grads) for _ in "12")
    finally:
        frontend.torch.set_num_threads(threads)
    expected = flash_attn_varlen_gradients(arguments, *grads)
    for name in SOURCES:
        assert_gradients(got[name], expected[name], DTYPES["f32"], name, frontend.device)
        assert_same_bits(again[name], got[name], name)


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("head_size", [1, 8, 64])  # narrow ones and wide ones have engines of their own
def test_no_heads_of_queries(frontend: Frontend, head_size: int) -> None:
    """Keys and values without a query have gradients of 0."""
    arguments = {"q": np.ones((4, 0, head_size), np.float32), "k": np.ones((4, 2, head_size), np.float32)}
    arguments["v"] = arguments["k"].copy()
    offsets = np.array([0, 4], np.int32)
    lengths = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 4, "max_seqlen_k": 4}
    got = frontend.gradients("flash_attn_varlen_func", arguments | lengths, ("k", "v"), (arguments["q"],))
    assert not got["k"].any()
    assert not got["v"].any()


@pytest.mark.frontends("torch")
def test_gradient_that_is_expanded(frontend: TorchFrontend, rng: np.random.Generator) -> None:
    """As out.sum().backward() gives it: one number, with strides of 0."""
    arguments = flash_attn_arguments(rng, Case(MIXED, lse=False))
    tensors = {k: frontend.tensor(v) for k, v in arguments.items() if isinstance(v, np.ndarray)}
    tensors["q"].requires_grad_()
    scalars = {k: v for k, v in arguments.items() if k not in tensors}
    frontend.fx.flash_attn_varlen_func(**tensors, **scalars).sum().backward()
    expected = flash_attn_varlen_gradients(arguments, np.ones_like(arguments["q"]))
    assert_gradients(frontend.array(tensors["q"].grad), expected["q"], DTYPES["f32"], "q", frontend.device)


@pytest.mark.frontends("jax")
@pytest.mark.parametrize("transform", ["remat", "scan", "vmap", "value_and_grad"])
def test_jax_transforms(frontend: JaxFrontend, rng: np.random.Generator, transform: str) -> None:
    jax, fx = frontend.jax, frontend.fx
    arguments = flash_attn_arguments(rng, Case(MIXED, lse=False))
    (grad,) = cotangents(rng, arguments)
    expected = flash_attn_varlen_gradients(arguments, grad)["q"]
    others = {k: v for k, v in arguments.items() if k != "q"}

    def loss(q: Any) -> Any:
        return (fx.flash_attn_varlen_func(q, **others) * grad).sum()

    q = jax.numpy.asarray(arguments["q"])
    got = {
        "remat": lambda: jax.jit(jax.grad(jax.checkpoint(loss)))(q),
        "scan": lambda: jax.grad(lambda q: jax.lax.scan(lambda c, x: (c + loss(x), None), 0.0, q[None])[0])(
            q
        ),
        "vmap": lambda: jax.vmap(jax.grad(loss))(q[None])[0],
        "value_and_grad": lambda: jax.jit(jax.value_and_grad(loss))(q)[1],
    }[transform]()
    assert_gradients(np.asarray(got), expected, DTYPES["f32"], "q", frontend.device)
