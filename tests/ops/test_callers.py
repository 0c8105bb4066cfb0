"""An error about a gradient that there is none of names the function that was called, and its arguments."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.frontends import JaxFrontend, TorchFrontend

X = np.ones((2, 3, 2, 16), np.float32)  # B S H D
PACKED = np.ones((2, 3, 3, 2, 16), np.float32)
SLOPES = np.ones(2, np.float32)
CACHE = {"k_cache": X, "v_cache": X, "cache_seqlens": 1}
CALLS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a cache": ("flash_attn_with_kvcache", {"q": X, **CACHE}, "q"),
    "a new key": ("flash_attn_with_kvcache", {"q": X, **CACHE, "k": X[:, :1], "v": X[:, :1]}, "k"),
    "slopes": ("flash_attn_func", {"q": X, "k": X, "v": X, "alibi_slopes": SLOPES}, "alibi_slopes"),
    "packed": ("flash_attn_qkvpacked_func", {"qkv": PACKED, "alibi_slopes": SLOPES}, "alibi_slopes"),
    "merged": ("merge_all_attn_states", {"outs": X, "lses": np.ones((2, 2, 3), np.float32)}, "outs"),
}  # fmt: skip


def first(results: Any) -> Any:
    return results[0] if isinstance(results, tuple) else results


@pytest.mark.frontends("torch", "torchtpu")
@pytest.mark.parametrize("call", CALLS)
def test_torch(frontend: TorchFrontend, call: str) -> None:
    function, given, source = CALLS[call]
    tensors = {k: frontend.tensor(x) if isinstance(x, np.ndarray) else x for k, x in given.items()}
    tensors[source].requires_grad_()
    out = first(getattr(frontend.fx, function)(**tensors))
    with pytest.raises(
        NotImplementedError, match=f"^{function}: no backward pass.* through {source}[;,]"
    ) as error:
        out.sum().backward()
    assert "out_a" not in str(error.value)


LAZY = """
import torch
import torch_xla

import flashxla.torch as fx

q = torch.ones((2, 3, 2, 16), device=torch_xla.device())
slopes = torch.ones(2, device=torch_xla.device(), requires_grad=True)
try:
    fx.flash_attn_func(q, q, q, alibi_slopes=slopes).sum().backward()
except NotImplementedError as error:
    print(error)
"""


@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs torch_xla")
def test_lazy() -> None:
    """In a process of its own: autograd asks once which devices there are, in a process's first backward pass."""
    environment = os.environ | {"PJRT_DEVICE": "CPU"}
    done = subprocess.run(
        [sys.executable, "-c", LAZY], env=environment, capture_output=True, text=True, timeout=120
    )
    assert "flash_attn_func: no backward pass" in done.stdout, done.stderr
    assert "through alibi_slopes;" in done.stdout


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("call", ["a cache", "merged"])
def test_torch_func(frontend: TorchFrontend, call: str) -> None:
    function, given, source = CALLS[call]
    tensors = {k: frontend.tensor(x) if isinstance(x, np.ndarray) else x for k, x in given.items()}

    def total(x: Any) -> Any:
        return first(getattr(frontend.fx, function)(**{**tensors, source: x})).sum()

    with pytest.raises(NotImplementedError, match=f"^{function}: no backward pass"):
        frontend.torch.func.grad(total)(tensors[source])


@pytest.mark.frontends("torch")
def test_a_result_without_gradient(frontend: TorchFrontend) -> None:
    """What is noticed when autograd is on its way back has the name, too; what is called next has its own."""
    fx = frontend.fx
    q = frontend.tensor(X).requires_grad_()
    out = fx.flash_attn_func(q, q, q)
    (grad,) = frontend.torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^flash_attn_func: no second derivative"):
        grad.sum().backward()
    lengths = frontend.tensor(np.array([0, 3], np.int32))
    own = fx.flash_attn_varlen_func(
        q[0], q[0], q[0], 3, lengths, 3, lengths, alibi_slopes=frontend.tensor(SLOPES).requires_grad_()
    )
    with pytest.raises(NotImplementedError, match=r"^flash_attn_varlen_func: no backward pass"):
        own.sum().backward()


@pytest.mark.frontends("jax")
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_jax(frontend: JaxFrontend, call: str, is_compiled: bool) -> None:
    function, given, source = CALLS[call]
    others = {k: frontend.tensor(x) if isinstance(x, np.ndarray) else x for k, x in given.items()}

    def total(x: Any) -> Any:
        return first(getattr(frontend.fx, function)(**{**others, source: x})).sum()

    wrap = frontend.jax.jit if is_compiled else functools.partial
    with pytest.raises(NotImplementedError, match=f"^{function}: no backward pass"):
        wrap(frontend.jax.grad(total))(others[source])
