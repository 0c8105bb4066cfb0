"""Whoever asks for a gradient that there is none of is told so, in every front end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.frontends import (
    Frontend,
    JaxFrontend,
    TorchFrontend,
    has_arrays,
    map_arrays,
)
from tests.ops.test_errors import CALLS, E4M3, t

# What is differentiated in each call, and what the call updates.
SOURCES = {
    "write": ("key", "value"),
    "write_one": ("key", "value"),
    "dense": ("q", "k", "v"),
    "paged": ("q",),
    "ragged": ("query",),
    "pair": ("query",),
    "merge": ("out_a", "lse_b"),
    "fused": ("query", "key", "value"),
    "fused_pair": ("query", "key", "value"),
    "packed": ("qkv",),
    "packed_pair": ("qkv",),
}
UPDATED = {
    "write": ("key_cache", "value_cache"),
    "write_one": ("kv_cache",),
    "fused": ("kv_cache",),
    "fused_pair": ("kv_cache",),
    "packed": ("kv_cache",),
    "packed_pair": ("kv_cache",),
}
COMPILED = ("write", "paged")  # inductor compiles for seconds

EAGER = pytest.mark.parametrize("call", [call for call in CALLS if call != "dense"])  # which has gradients


class TorchCall:
    """A call whose sources require grad."""

    def __init__(self, frontend: TorchFrontend, call: str, requires_grad: bool = True) -> None:
        function, valid = CALLS[call]
        self.frontend = frontend
        self.function = getattr(frontend.fx, function)
        self.tensors = {k: map_arrays(frontend.tensor, v) for k, v in valid.items() if has_arrays(v)}
        self.scalars = {k: v for k, v in valid.items() if k not in self.tensors}
        self.sources = [self.tensors[name] for name in SOURCES[call]]
        updated = [self.tensors[name] for name in UPDATED.get(call, ())]
        self.updated = [x for value in updated for x in (value if isinstance(value, tuple) else (value,))]
        for source in self.sources:
            source.requires_grad_(requires_grad)

    def run(self) -> list[Any]:
        """Its results, and the tensors that it updated."""
        result = self.frontend.call(self.function, self.tensors, self.scalars)
        results = result if isinstance(result, (tuple, list)) else [result]
        return [x for x in results if x is not None] + self.updated


def assert_no_backward(error: pytest.ExceptionInfo[BaseException], call: str) -> None:
    assert f"{CALLS[call][0]}: no backward pass" in str(error.value)


def check_backward(frontend: TorchFrontend, call: str) -> None:
    for result in TorchCall(frontend, call).run():
        assert result.requires_grad
        with pytest.raises(NotImplementedError) as error:
            result.sum().backward(retain_graph=True)
        assert_no_backward(error, call)
        assert SOURCES[call][0] in str(error.value)


def check_forward(frontend: TorchFrontend, call: str) -> None:
    """With sources that require grad a call computes what it computes without."""
    got, plain = TorchCall(frontend, call), TorchCall(frontend, call, requires_grad=False)
    for x, y in zip(got.run(), plain.run(), strict=True):
        assert not y.requires_grad
        assert np.array_equal(frontend.array(x), frontend.array(y))


@pytest.mark.frontends("torch", "lazy")
@EAGER
def test_backward_raises(frontend: TorchFrontend, call: str) -> None:
    check_backward(frontend, call)


@pytest.mark.frontends("openxla", "inductor")
@pytest.mark.parametrize("call", COMPILED)
def test_backward_raises_in_torch_compile(frontend: TorchFrontend, call: str) -> None:
    check_backward(frontend, call)


@pytest.mark.frontends("torch", "lazy")
@EAGER
def test_forward_needs_no_gradient(frontend: TorchFrontend, call: str) -> None:
    check_forward(frontend, call)


@pytest.mark.frontends("openxla")
@pytest.mark.parametrize("call", COMPILED)
def test_forward_needs_no_gradient_in_torch_compile(frontend: TorchFrontend, call: str) -> None:
    check_forward(frontend, call)


@pytest.mark.frontends("torch", "lazy")
@EAGER
def test_no_grad(frontend: TorchFrontend, call: str) -> None:
    with frontend.torch.no_grad():
        assert not any(result.requires_grad for result in TorchCall(frontend, call).run())


@pytest.mark.frontends("torch")
@EAGER
def test_inference_mode(frontend: TorchFrontend, call: str) -> None:
    with frontend.torch.inference_mode():
        for result in TorchCall(frontend, call).run():
            assert result.is_inference() and not result.requires_grad


def transformed(frontend: TorchFrontend, call: str, transform: str) -> Any:
    """A transformation of torch.func of a call, in its first source."""
    func = frontend.torch.func
    plain = TorchCall(frontend, call, requires_grad=False)
    name = SOURCES[call][0]
    x = plain.tensors[name]

    def function(x: Any) -> Any:
        result = plain.function(**plain.tensors | {name: x}, **plain.scalars)
        return (x if result is None else result).sum()

    asks: dict[str, Callable[[], Any]] = {
        "grad": lambda: func.grad(function)(x),
        "vjp": lambda: func.vjp(function, x),
        "jacrev": lambda: func.jacrev(function)(x),
        "jvp": lambda: func.jvp(function, (x,), (x,)),
        "jacfwd": lambda: func.jacfwd(function)(x),
    }
    return asks[transform]()


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("transform", ["grad", "vjp", "jacrev"])
@pytest.mark.parametrize("call", ["dense", "paged", "pair", "write"])
def test_function_transforms_raise(frontend: TorchFrontend, call: str, transform: str) -> None:
    with pytest.raises(NotImplementedError, match=f"{CALLS[call][0]}: .*no backward pass"):
        transformed(frontend, call, transform)


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("transform", ["jvp", "jacfwd"])
@pytest.mark.parametrize(
    ("call", "more"),
    [("dense", ""), ("pair", ", and no backward pass"), ("write", ", and no backward pass")],
)
def test_forward_mode_raises(frontend: TorchFrontend, call: str, more: str, transform: str) -> None:
    """That there is no backward pass is said only of an operation that has none."""
    with pytest.raises(NotImplementedError) as error:
        transformed(frontend, call, transform)
    assert str(error.value) == f"{CALLS[call][0]}: no forward-mode derivative{more}"


@pytest.mark.frontends("torch")
def test_forward_mode_of_a_gradient_raises(frontend: TorchFrontend) -> None:
    call = TorchCall(frontend, "dense")
    forward_ad = frontend.torch.autograd.forward_ad
    (out,) = call.run()
    with forward_ad.dual_level():
        cotangent = forward_ad.make_dual(frontend.torch.ones_like(out), frontend.torch.ones_like(out))
        with pytest.raises(NotImplementedError) as error:
            frontend.torch.autograd.grad(out, call.sources, cotangent)
    said = "flash_attn_varlen_func: no forward-mode derivative, and no second derivative"
    assert str(error.value) == said


@pytest.mark.frontends("torch", "lazy")
@pytest.mark.parametrize("call", UPDATED)
def test_autograd_sees_an_update(frontend: TorchFrontend, call: str) -> None:
    """A gradient that needs a cache's old value is refused: the write bumps the version."""
    plain = TorchCall(frontend, call, requires_grad=False)
    versions = [tensor._version for tensor in plain.updated]
    weight = frontend.torch.ones_like(plain.updated[0]).requires_grad_()
    product = (weight * plain.updated[0]).sum()
    plain.run()
    assert [tensor._version for tensor in plain.updated] == [version + 1 for version in versions]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.frontends("torch", "lazy")
def test_updated_views(frontend: TorchFrontend) -> None:
    """K and V as views of one tensor."""
    call = TorchCall(frontend, "write")
    pool = frontend.torch.zeros(2, 4, 8, 2, 16, device=frontend.target_device())
    call.tensors |= {"key_cache": pool[0], "value_cache": pool[1]}
    call.run()
    assert pool.requires_grad
    with pytest.raises(NotImplementedError, match="reshape_and_cache_flash: no backward pass"):
        pool.sum().backward()


@pytest.mark.frontends("jax", "jax_jit")
@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "linearize", "hessian"])
@EAGER
def test_jax_raises(frontend: JaxFrontend, call: str, transform: str) -> None:
    function, x = jax_function(frontend, call)
    jax = frontend.jax
    asks: dict[str, Callable[[], Any]] = {
        "grad": lambda: jax.grad(function)(x),
        "vjp": lambda: jax.vjp(function, x),
        "jvp": lambda: jax.jvp(function, (x,), (x,)),
        "linearize": lambda: jax.linearize(function, x),
        "hessian": lambda: jax.hessian(function)(x),
    }
    with pytest.raises(NotImplementedError) as error:
        asks[transform]()
    assert_no_backward(error, call)


@pytest.mark.frontends("jax", "jax_jit")
@EAGER
def test_jax_stop_gradient(frontend: JaxFrontend, call: str) -> None:
    """What is kept out of the derivative is no reason to refuse one."""
    function, x = jax_function(frontend, call)
    jax = frontend.jax
    gradient = jax.grad(lambda x: (2.0 * x).sum() + function(jax.lax.stop_gradient(x)))(x)
    assert np.array_equal(np.asarray(gradient), np.full(x.shape, 2.0))


# What keeps a call of flash_attn_varlen_func from having gradients, and what the message says.
WITHOUT_GRADIENTS = [
    ("paged", {}, "block_table"),
    ("dense", {"k_descale": np.ones(1, np.float32)}, "k_descale, which has no gradient"),
    ("dense", {name: t(9, 2, 16, dtype=E4M3) for name in "kv"}, "k is float8_e4m3fn"),
]


@pytest.mark.frontends("torch", "lazy")
@pytest.mark.parametrize(("call", "changes", "reason"), WITHOUT_GRADIENTS, ids=lambda x: str(x)[:20])
def test_torch_says_why(frontend: TorchFrontend, call: str, changes: dict[str, Any], reason: str) -> None:
    with_gradients = TorchCall(frontend, call)
    with_gradients.tensors |= {name: frontend.tensor(x) for name, x in changes.items()}
    with pytest.raises(NotImplementedError, match=f"flash_attn_varlen_func: no backward pass .*{reason}"):
        with_gradients.run()[0].sum().backward()


@pytest.mark.frontends("jax", "jax_jit")
@pytest.mark.parametrize(("call", "changes", "reason"), WITHOUT_GRADIENTS, ids=lambda x: str(x)[:20])
def test_jax_says_why(frontend: Frontend, call: str, changes: dict[str, Any], reason: str) -> None:
    function, x = jax_function(frontend, call, changes)
    with pytest.raises(NotImplementedError, match=f"flash_attn_varlen_func: no backward pass .*{reason}"):
        frontend.jax.grad(function)(x)


@pytest.mark.frontends("torch", "lazy")
def test_slopes_have_no_gradient(frontend: TorchFrontend) -> None:
    call = TorchCall(frontend, "dense")
    call.tensors["alibi_slopes"] = frontend.tensor(np.ones(4, np.float32)).requires_grad_()
    out = call.run()[0]
    (gradient,) = frontend.torch.autograd.grad(out.sum(), call.sources[:1], retain_graph=True)
    assert gradient.shape == call.sources[0].shape  # which asks nothing of the slopes
    with pytest.raises(NotImplementedError, match=r"no backward pass: .* through alibi_slopes"):
        out.sum().backward()


@pytest.mark.frontends("torch", "lazy")
def test_second_derivative_raises(frontend: TorchFrontend) -> None:
    call = TorchCall(frontend, "dense")
    (gradient,) = frontend.torch.autograd.grad(call.run()[0].sum(), call.sources[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="flash_attn_varlen_func: no second derivative"):
        gradient.sum().backward()


@pytest.mark.frontends("jax", "jax_jit")
def test_jax_second_derivative_raises(frontend: Frontend) -> None:
    function, x = jax_function(frontend, "dense")
    jax = frontend.jax
    with pytest.raises(NotImplementedError, match="flash_attn_varlen_func: no second derivative"):
        jax.grad(lambda x: jax.grad(function)(x).sum())(x)


def jax_function(
    frontend: Frontend, call: str, changes: dict[str, Any] | None = None
) -> tuple[Callable[[Any], Any], Any]:
    """A function of the first source of a call, and where to differentiate it."""
    assert isinstance(frontend, JaxFrontend)
    name, valid = CALLS[call]
    source = SOURCES[call][0]

    def function(x: Any) -> Any:
        result = getattr(frontend.fx, name)(**valid | (changes or {}) | {source: x})
        return (result[0] if isinstance(result, (tuple, list)) else result).sum()

    jitted = frontend.jax.jit(function) if frontend.name == "jax_jit" else function
    return jitted, frontend.jax.device_put(valid[source], frontend.target)
