"""FlashAttention's other functions: the results of flash_attn_varlen_func in other shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashxla.ops.flash_attn_forms import FORMS
from tests.checks import assert_same_bits
from tests.frontends import Frontend, JaxFrontend, TorchFrontend

Arguments = dict[str, Any]
BATCH, LEN_Q, LEN_K, HEADS, KV_HEADS, DIM = 3, 5, 9, 4, 2, 16


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def offsets(length: int) -> np.ndarray:
    return np.arange(0, BATCH * length + 1, length, dtype=np.int32)


def flat(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x.reshape(-1, *x.shape[2:]))


def calls(rng: np.random.Generator) -> dict[str, tuple[Arguments, Arguments]]:
    """Of each function the arguments of a call, and those of flash_attn_varlen_func."""
    q, k, v = (
        normal(rng, BATCH, length, heads, DIM)
        for length, heads in ((LEN_Q, HEADS), (LEN_K, KV_HEADS), (LEN_K, KV_HEADS))
    )
    qkv = normal(rng, BATCH, LEN_Q, 3, HEADS, DIM)
    kv = np.stack([k, v], 2)
    common = {"cu_seqlens_q": offsets(LEN_Q), "max_seqlen_q": LEN_Q}
    keys = {"cu_seqlens_k": offsets(LEN_K), "max_seqlen_k": LEN_K}
    same_keys = {"cu_seqlens_k": offsets(LEN_Q), "max_seqlen_k": LEN_Q}
    apart = {"q": flat(q), "k": flat(k), "v": flat(v), **common, **keys}
    of_qkv = {name: flat(qkv[:, :, i]) for i, name in enumerate("qkv")} | common | same_keys
    return {
        "flash_attn_func": ({"q": q, "k": k, "v": v}, apart),
        "flash_attn_kvpacked_func": ({"q": q, "kv": kv}, apart),
        "flash_attn_qkvpacked_func": ({"qkv": qkv}, of_qkv),
        "flash_attn_varlen_kvpacked_func": ({"q": flat(q), "kv": flat(kv), **common, **keys}, apart),
        "flash_attn_varlen_qkvpacked_func": (
            {"qkv": flat(qkv), "cu_seqlens": offsets(LEN_Q), "max_seqlen": LEN_Q},
            of_qkv,
        ),
    }


SINKS = np.linspace(-1, 2, HEADS, dtype=np.float32)
OPTIONS: list[Arguments] = [
    {},
    {"causal": True, "softmax_scale": 0.3, "softcap": 2.0},
    {"window_size": (2, 1), "deterministic": True},
    {"causal": True, "s_aux": SINKS},
]
FUNCTIONS = [form.__name__ for form in FORMS]


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_results(frontend: Frontend, rng: np.random.Generator, function: str, options: Arguments) -> None:
    given, plain = calls(rng)[function]
    plain_options = {k: v for k, v in options.items() if k != "deterministic"}
    out, lse = frontend.flash_attn_varlen_func(**plain, **plain_options, return_softmax_lse=True)
    assert lse is not None
    if "varlen" not in function:
        out = out.reshape(BATCH, LEN_Q, *out.shape[1:])
        lse = lse.reshape(HEADS, BATCH, LEN_Q).swapaxes(0, 1)
    (got,) = frontend.run(function, {**given, **options})
    assert_same_bits(got, out, "out")
    if frontend.name not in ("lazy", "openxla", "jax", "jax_jit", "torch"):
        return  # None is no result of the others' test adapters
    results = with_probs(frontend, function, {**given, **options})
    assert len(results) == 3
    assert results[2] is None
    assert_same_bits(results[0], out, "out")
    assert_same_bits(np.ascontiguousarray(results[1]), np.ascontiguousarray(lse), "lse")


def with_probs(frontend: Frontend, function: str, arguments: Arguments) -> tuple[Any, ...]:
    is_jax = isinstance(frontend, JaxFrontend)
    assert is_jax or isinstance(frontend, TorchFrontend)
    tensor = (lambda x: x) if is_jax else frontend.tensor
    given = {k: tensor(v) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
    out, lse, probs = getattr(frontend.fx, function)(**given, return_attn_probs=True)
    array = np.asarray if is_jax else frontend.array
    return array(out), array(lse), probs


@pytest.mark.frontends("torch", "lazy", "jax", "jax_jit", "torchtpu", "torchtpu_compiled")
@pytest.mark.parametrize("sinks", [(), ("s_aux",)], ids=["plain", "sinks"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients(
    frontend: Frontend, rng: np.random.Generator, function: str, sinks: tuple[str, ...]
) -> None:
    given, plain = calls(rng)[function]
    more = {"deterministic": True, **dict.fromkeys(sinks, SINKS)}
    given, plain = given | more, plain | more
    grad = normal(rng, BATCH * LEN_Q, HEADS, DIM)
    expected = frontend.gradients("flash_attn_varlen_func", plain, ("q", "k", "v", *sinks), (grad,))
    sources = tuple(name for name in ("q", "k", "v", "kv", "qkv") if name in given)
    shaped = grad if "varlen" in function else grad.reshape(BATCH, LEN_Q, HEADS, DIM)
    got = frontend.gradients(function, given, sources + sinks, (shaped,))
    for name in sinks:
        assert np.abs(expected[name]).min() > 0
        # Threads may add in another order, and the summands of a sink cancel each other.
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-5, atol=1e-6)
    packed = {"q": "q", "k": "k", "v": "v", "kv": "kv", "qkv": "qkv"}
    for name in sources:
        parts = np.stack([expected[part] for part in packed[name]], 1)
        parts = parts if len(name) > 1 else parts[:, 0]
        np.testing.assert_array_equal(got[name].reshape(parts.shape), parts)


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("function", ["flash_attn_func", "flash_attn_qkvpacked_func"])
def test_lengths_that_change(frontend: TorchFrontend, function: str) -> None:
    """One graph for all of them."""
    torch = frontend.torch
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    form = getattr(frontend.fx, function)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(form, fullgraph=True, dynamic=True, backend=counter)
    for batch, length in ((2, 8), (3, 9), (4, 10), (5, 11)):
        parts = [torch.randn(batch, length, 4, 16) for _ in "qkv"]
        given = parts if function == "flash_attn_func" else [torch.stack(parts, 2)]
        torch.testing.assert_close(compiled(*given), form(*given))
    assert counter.frame_count == 1


@pytest.mark.frontends("torch", "jax")
@pytest.mark.parametrize(("batch", "length"), [(0, 5), (3, 0)])
def test_nothing_to_attend(frontend: Frontend, batch: int, length: int) -> None:
    shapes = {
        "q": (batch, length, HEADS, DIM),
        "k": (batch, 9, KV_HEADS, DIM),
        "v": (batch, 9, KV_HEADS, DIM),
    }
    given = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    out, lse, _ = with_probs(frontend, "flash_attn_func", given)
    assert out.shape == (batch, length, HEADS, DIM)
    assert lse.shape == (batch, HEADS, length)


@pytest.mark.frontends("torch", "jax")
def test_alibi_of_sequences(frontend: Frontend, rng: np.random.Generator) -> None:
    given, plain = calls(rng)["flash_attn_func"]
    slopes = {"alibi_slopes": rng.random((BATCH, HEADS)).astype(np.float32)}
    out, _ = frontend.flash_attn_varlen_func(**plain, **slopes)
    (got,) = frontend.run("flash_attn_func", {**given, **slopes})
    assert_same_bits(flat(got), out, "out")


@pytest.mark.frontends("torch", "jax")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_sinks_by_their_newer_name(frontend: Frontend, rng: np.random.Generator, function: str) -> None:
    given, _ = calls(rng)[function]
    (expected,), (got,) = (frontend.run(function, {**given, n: SINKS}) for n in ("s_aux", "learnable_sink"))
    assert_same_bits(got, expected, "out")
    with pytest.raises(ValueError, match=f"^{function}: learnable_sink: got it beside s_aux; accepted: one"):
        frontend.run(function, {**given, "s_aux": SINKS, "learnable_sink": SINKS})


ERRORS = [
    ("flash_attn_func", {"dropout_p": 0.1}, ValueError, "dropout_p: got 0.1; accepted: 0.0"),
    ("flash_attn_varlen_qkvpacked_func", {"dropout_p": 0.5}, ValueError, "dropout_p: got 0.5; accepted: 0.0"),
    (
        "flash_attn_func",
        {"q": np.ones((2, 3), np.float32)},
        ValueError,
        r"q: got shape \[2, 3\]; accepted: \[B, Sq",
    ),
    (
        "flash_attn_func",
        {"v": np.ones((3, 8, 2, 16), np.float32)},
        ValueError,
        r"v: .*accepted: \[3, 9, Hk, Dv\]",
    ),
    ("flash_attn_func", {"k": None}, TypeError, "k: got None"),
    ("flash_attn_func", {"k": np.ones((3, 9, 3, 16), np.float32)}, ValueError, "q: got 4 heads|v: got shape"),
    (
        "flash_attn_kvpacked_func",
        {"kv": np.ones((3, 9, 3, 2, 16), np.float32)},
        ValueError,
        r"accepted: \[B, Sk, 2",
    ),
    (
        "flash_attn_qkvpacked_func",
        {"qkv": np.ones((3, 5, 2, 4, 16), np.float32)},
        ValueError,
        r"\[B, S, 3, H, D\]",
    ),
    ("flash_attn_qkvpacked_func", {"softcap": -1.0}, ValueError, "softcap: got -1.0"),
    (
        "flash_attn_func",
        {"s_aux": SINKS[:3]},
        ValueError,
        r"s_aux: got shape \[3\]; accepted: \[Hq\] with Hq = 4",
    ),
    (
        "flash_attn_kvpacked_func",
        {"learnable_sink": SINKS[:3]},
        ValueError,
        r"learnable_sink: got shape \[3\]",
    ),
    # Arguments that these functions do not have stay unknown.
    ("flash_attn_func", {"page_table": SINKS}, TypeError, "unexpected keyword argument 'page_table'"),
    ("flash_attn_func", {"s_aux": SINKS, "x": 1}, TypeError, "unexpected keyword argument 'x'"),
    ("flash_attn_func", {"learnable_sink": SINKS, "x": 1}, TypeError, "unexpected keyword argument 'x'"),
    (
        "flash_attn_qkvpacked_func",
        {"qkv": np.ones((3, 5, 3, 4, 16), np.int32)},
        TypeError,
        "qkv: got dtype int32",
    ),
    ("flash_attn_varlen_qkvpacked_func", {"max_seqlen": -1}, ValueError, "max_seqlen: got -1"),
    (
        "flash_attn_varlen_kvpacked_func",
        {"cu_seqlens_k": np.zeros(2, np.int32)},
        ValueError,
        "cu_seqlens_k: got",
    ),
]


@pytest.mark.frontends("torch", "jax", "jax_jit")
@pytest.mark.parametrize(("function", "changes", "error", "message"), ERRORS, ids=lambda x: str(x)[:30])
def test_errors(
    frontend: Frontend,
    rng: np.random.Generator,
    function: str,
    changes: Arguments,
    error: type[Exception],
    message: str,
) -> None:
    given, _ = calls(rng)[function]
    with pytest.raises(error, match=f"^{function}(: |\\(\\) got an ).*({message})"):
        frontend.run(function, {**given, **changes})
