"""Calls the operation of docs/adding-an-operation.md through one front end, and holds it against NumPy.

python -m tests.docs.scale_heads SOURCES FRONTEND
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

T, H, D = 5, 3, 7
Array = np.ndarray


def use(sources: str) -> None:
    """Import flashxla from these sources, not from an editable install."""
    sys.meta_path[:] = [
        finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable")
    ]
    sys.path.insert(0, sources)


def inputs() -> dict[str, Array]:
    rng = np.random.default_rng()
    x, scale = rng.standard_normal((T, H, D), np.float32), rng.standard_normal(H, np.float32)
    return {"x": x, "scale": scale, "amax": np.array([0.0, 100.0, 0.1], np.float32)}


def near(got: Any, expected: Array) -> None:
    np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-4, atol=1e-3)


def raises(function: Callable[[], Any], message: str) -> None:
    try:
        function()
    except NotImplementedError as error:
        assert message in str(error), error
    else:
        raise AssertionError(f"nothing says {message!r}")


def check_torch(name: str, x: Array, scale: Array, amax: Array) -> None:
    import torch

    from flashxla import torch as module
    from tests.frontends import FRONTENDS, TorchFrontend

    frontend = FRONTENDS[name]("cpu")
    assert isinstance(frontend, TorchFrontend)
    fx: Any = module  # which type checkers know without this operation
    tensors = {n: frontend.tensor(a) for n, a in (("x", x), ("scale", scale), ("amax", amax))}
    tensors["x"].requires_grad_()
    tensors["scale"].requires_grad_()
    weight = frontend.tensor(np.arange(T * H * D, dtype=np.float32).reshape(T, H, D))
    out = frontend.call(fx.scale_heads, tensors, {})
    near(frontend.array(out), x * scale[:, None])
    near(frontend.array(tensors["amax"]), np.maximum(amax, np.abs(x).max((0, 2))))
    (out * weight).sum().backward(retain_graph=True)
    w = frontend.array(weight)
    near(frontend.array(tensors["x"].grad), w * scale[:, None])
    near(frontend.array(tensors["scale"].grad), (w * x).sum((0, 2)))
    assert not tensors["amax"].requires_grad
    if name == "torch":
        (grad,) = torch.autograd.grad((out * weight).sum(), tensors["x"], create_graph=True)
        raises(lambda: grad.sum().backward(), "scale_heads_backward: no backward pass")
        plain = {n: t.detach().clone() for n, t in tensors.items()}
        torch.library.opcheck(torch.ops.flashxla.scale_heads.default, (), plain)
        assert "Tensor(a!) amax" in str(torch.ops.flashxla.scale_heads.default._schema)


def without_constants() -> Callable[..., Any]:
    """The operation, declared without an exception for amax."""
    from flashxla import jax_calls
    from flashxla.ops import OPS
    from flashxla.ops.op import Aval

    (op,) = (op for op in OPS if op.name == "scale_heads")
    assert op.vjp is not None
    strict = dataclasses.replace(op, vjp=dataclasses.replace(op.vjp, constants=()))

    def call(*arrays: Any) -> Any:
        avals = [Aval(tuple(x.shape), str(x.dtype)) for x in arrays]
        return jax_calls.custom_call(strict.resolve(dict(zip(op.names, avals, strict=True)), {}), arrays)

    return call


def check_jax(name: str, x: Array, scale: Array, amax: Array) -> None:
    import jax

    from flashxla import jax as module

    fx: Any = module  # which type checkers know without this operation
    weight = np.arange(T * H * D, dtype=np.float32).reshape(T, H, D)

    def loss(x: Any, scale: Any) -> Any:
        out, new = fx.scale_heads(x, scale, amax)
        return (out * weight).sum(), (out, new)

    differentiated = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    if name == "jax_jit":
        differentiated = jax.jit(differentiated)
    (_, (out, new)), (grad_x, grad_scale) = differentiated(x, scale)
    near(out, x * scale[:, None])
    near(new, np.maximum(amax, np.abs(x).max((0, 2))))
    near(grad_x, weight * scale[:, None])
    near(grad_scale, (weight * x).sum((0, 2)))
    first = jax.grad(lambda x: loss(x, scale)[0])
    raises(lambda: jax.grad(lambda x: first(x).sum())(x), "scale_heads_backward: no backward pass")
    assert not jax.grad(lambda x: fx.scale_heads(x, scale, amax)[1].sum())(x).any()
    strict = without_constants()
    raises(lambda: jax.grad(lambda x: strict(x, scale, amax)[1].sum())(x), "derivative of amax")
    raises(lambda: jax.grad(lambda a: strict(x, scale, a)[0].sum())(amax), "derivative of amax")
    near(jax.grad(lambda x: (strict(x, scale, amax)[0] * weight).sum())(x), weight * scale[:, None])
    if name == "jax_jit":
        step = jax.jit(lambda amax, x: fx.scale_heads(x, scale, amax), donate_argnums=0)
        donated = jax.numpy.asarray(amax) + 0  # memory of XLA's own, which it can give away
        address = donated.unsafe_buffer_pointer()
        _, new = step(donated, x)
        assert new.unsafe_buffer_pointer() == address


def main(sources: str, name: str) -> None:
    use(sources)
    import flashxla

    (check_jax if name.startswith("jax") else check_torch)(name, **inputs())
    framework = "jax" if name.startswith("jax") else "torch"
    module = sys.modules[f"flashxla.{framework}"]
    arrays: list[Any] = list(inputs().values())
    if framework == "torch":
        import torch

        arrays = [torch.from_numpy(array) for array in arrays]
    assert "a head at a time" in str(flashxla.explain(module.scale_heads, *arrays, platform="cpu"))
    print(f"{name}: right")


if __name__ == "__main__":
    main(*sys.argv[1:])
