"""torchax: caches keep their buffers, shared arrays stay as they are, and no update is lost without a word."""

from __future__ import annotations

import re
import subprocess
import sys

import jax
import numpy
import pytest
import torch
import torchax
from torchax import interop

import flashxla.torch as fx
import flashxla.torchax
from tests.torch_steps import arguments, expected, write_and_attend

flashxla.torchax.register()
env = torchax.default_env()


def on_jax(tensors):
    """torchax's tensors, each the sole owner of its array."""
    return [torchax.tensor.Tensor(jax.numpy.array(x.numpy(), copy=True), env) for x in tensors]


def pointer(tensor):
    return tensor.jax().unsafe_buffer_pointer()


def check(tensors, references):
    for x, reference in zip(tensors, references, strict=True):
        torch.testing.assert_close(x.torch(), reference, atol=1e-5, rtol=1e-5)


@pytest.fixture
def given():
    return arguments()


def test_eager_calls_update_in_place(given):
    tensors = on_jax(given)
    caches = tensors[2:4]
    before = list(map(pointer, caches))
    with env:
        for _ in range(3):
            out = write_and_attend(*tensors)
    check([out, *caches], expected(given, 3))
    assert list(map(pointer, caches)) == before


@pytest.mark.parametrize("share", ["clone", "detach", "jax"])
def test_what_shares_an_array_keeps_it(given, share):
    tensors = on_jax(given)
    with env:
        other = getattr(tensors[2], share)()
        out = write_and_attend(*tensors)
    check([out, *tensors[2:4]], expected(given))
    kept = other if share == "jax" else other.jax()
    torch.testing.assert_close(torch.from_numpy(jax.device_get(kept).copy()), given[2])


def test_views_of_one_tensor(given):
    tensors = on_jax(given)
    (both,) = on_jax([torch.stack(given[2:4])])
    with env:
        tensors[2:4] = both[0], both[1]
        out = write_and_attend(*tensors)
    reference = expected(given)
    check([out, both], [reference[0], torch.stack(reference[1:])])


def test_jit_with_donated_caches(given):
    def step(caches, others):
        return write_and_attend(*others[:2], *caches, *others[2:]), caches

    jit = interop.jax_jit(step, kwargs_for_jax_jit={"donate_argnums": 0})
    tensors = on_jax(given)
    caches, others = tensors[2:4], tensors[:2] + tensors[4:]
    before = list(map(pointer, caches))
    for _ in range(3):
        out, caches = jit(caches, others)
        assert list(map(pointer, caches)) == before
    check([out, *caches], expected(given, 3))
    arrays = jax.tree.map(lambda x: x.jax(), (caches, others))
    program = jax.jit(interop.jax_view(step), donate_argnums=0).lower(*arrays).compile().as_text()
    assert program.count("may-alias") + program.count("must-alias") == 2
    assert not re.search(r"= \S+ copy(-start)?\(", program)


def test_a_function_that_does_not_return_its_caches(given):
    def step(*tensors):
        return write_and_attend(*tensors)

    tensors = on_jax(given)
    with pytest.raises(RuntimeError, match=r"reshape_and_cache_flash: key_cache: .*does not return it"):
        interop.jax_jit(step)(*tensors)
    check(tensors[2:4], given[2:4])


def test_a_function_that_updates_what_is_no_argument(given):
    tensors = on_jax(given)

    def step(others):
        return write_and_attend(*others[:2], *tensors[2:4], *others[2:])

    with pytest.raises(RuntimeError, match=r"reshape_and_cache_flash: key_cache: got a tensor from outside"):
        interop.jax_jit(step)(tensors[:2] + tensors[4:])
    check(tensors[2:4], given[2:4])


def test_a_cache_of_the_function_itself_may_be_forgotten(given):
    def step(others):
        scratch = [torch.zeros(given[2].shape, device="jax") for _ in range(2)]
        return write_and_attend(*others[:2], *scratch, *others[2:])

    tensors = on_jax(given)
    out = interop.jax_jit(step)(tensors[:2] + tensors[4:])
    empty = [*given[:2], torch.zeros_like(given[2]), torch.zeros_like(given[3]), *given[4:]]
    check([out], [write_and_attend(*empty)])


class Layer(torch.nn.Module):
    def __init__(self, key_cache, value_cache):
        super().__init__()
        self.register_buffer("key_cache", key_cache)
        self.register_buffer("value_cache", value_cache)

    def forward(self, key, value, *rest):
        return write_and_attend(key, value, self.key_cache, self.value_cache, *rest)


def test_modules_with_cache_buffers(given):
    tensors = on_jax(given)
    others = tensors[:2] + tensors[4:]
    with env:
        layer = Layer(*(x.clone() for x in given[2:4])).to("jax")
        out = layer(*others)
        check([out, layer.key_cache, layer.value_cache], expected(given))
        with pytest.raises(RuntimeError, match="JittableModule does not return its module's buffers"):
            interop.JittableModule(Layer(*(x.clone() for x in given[2:4])).to("jax"))(*others)


def test_tensors_of_two_devices(given):
    tensors = on_jax(given)
    with env, pytest.raises(TypeError, match=r"reshape_and_cache_flash: value: got a tensor on cpu"):
        fx.reshape_and_cache_flash(tensors[0], given[1], *tensors[2:5])


def test_what_has_no_gradient_says_so(given):
    def loss(out, lse):
        return fx.merge_attn_states(out, lse, out, lse)[0].square().sum()

    states = on_jax([torch.randn(3, 2, 8), torch.randn(2, 3)])
    with pytest.raises(NotImplementedError, match="merge_attn_states: no backward pass"):
        jax.grad(interop.jax_view(loss))(*(x.jax() for x in states))
    with env:
        loss(*states)
        for x in states:
            x.requires_grad_()
        with pytest.raises(NotImplementedError, match="merge_attn_states: no backward pass"):
            loss(*states)
        with torch.no_grad():
            loss(*states)
        tensors = on_jax(given)
        tensors[0].requires_grad_()
        with pytest.raises(NotImplementedError, match=r"reshape_and_cache_flash: no backward pass.*key"):
            write_and_attend(*tensors)


@pytest.mark.parametrize("jitted", [False, True])
def test_gradients_of_jax(jitted):
    """torchax programs are trained by JAX's transformations."""
    tensors = [torch.randn(12, 2, 16) for _ in range(3)]
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32)

    def loss(q, k, v):
        return fx.flash_attn_varlen_func(
            q, k, v, 7, on_jax([offsets])[0], 7, on_jax([offsets])[0], causal=True
        ).sum()

    for x in tensors:
        x.requires_grad_()
    fx.flash_attn_varlen_func(*tensors, 7, offsets, 7, offsets, causal=True).sum().backward()
    function = jax.grad(interop.jax_view(loss), argnums=(0, 1, 2))
    got = (jax.jit(function) if jitted else function)(
        *(x.jax() for x in on_jax([x.detach() for x in tensors]))
    )
    for gradient, x in zip(got, tensors, strict=True):
        torch.testing.assert_close(torch.from_numpy(numpy.array(gradient)), x.grad)


def test_a_torchax_that_does_not_import(tmp_path):
    """As with PyTorch 2.13, which has some operations no more."""
    (tmp_path / "torchax.py").write_text("import torch; torch.ops.aten.prod.dim_Dimname_of_old")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import flashxla.torchax"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1
    message = (
        r"flashxla.torchax: got torchax \S+ with PyTorch 2\S+, which do not go together: .*dim_Dimname_of_old"
    )
    assert re.search(f"ImportError: {message}", ended.stderr), ended.stderr


def test_a_second_registration_changes_nothing():
    kernel = env._ops[torch.ops.flashxla.reshape_and_cache_flash.default]
    call_torch = interop.call_torch
    flashxla.torchax.register()
    assert env._ops[torch.ops.flashxla.reshape_and_cache_flash.default] is kernel
    assert interop.call_torch is call_torch
