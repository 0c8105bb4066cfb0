"""CUDA graphs of a training step: one recording serves every packing of documents of its padded shape."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashxla
from tests.checks import assert_gradients, assert_same_bits
from tests.expanded import expanded, stored
from tests.frontends import TorchFrontend
from tests.gradients import gradients_from

T, S, HEADS, KV_HEADS = 520, 6, 4, 2


@dataclasses.dataclass(frozen=True)
class Kind:
    """dim: the head size. engine: of the gradients, on a Hopper GPU."""

    engine: str
    dim: int
    dtype: type = ml_dtypes.bfloat16
    deterministic: bool = False
    alibi: bool = False
    expanded: bool = False  # all KV heads of v are one in memory


KINDS = {
    "wide": Kind("wide", 128),
    "deterministic": Kind("wide", 128, deterministic=True),
    "heads of 256": Kind("wide", 256),
    "ALiBi": Kind("wide", 64, alibi=True),
    "tile": Kind("tile", 256, expanded=True),
    "tile32": Kind("tile32", 64, np.float32),
    "aligned copies": Kind("wide", 100),
    "general": Kind("general", 264, np.float32),
}
SOURCES = ("q", "k", "v")


def documents(rng: np.random.Generator, kind: Kind) -> dict[str, np.ndarray]:
    """Numbers, and the offsets of random documents; the tokens behind them are NaN."""
    heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS, "grad": HEADS}
    arrays = {
        name: rng.standard_normal((T, count, kind.dim), np.float32).astype(kind.dtype)
        for name, count in heads.items()
    }
    count = int(rng.integers(1, S, endpoint=True))
    offsets = np.sort(rng.integers(0, T, count, endpoint=True))
    for array in arrays.values():
        array[offsets[-1] :] = np.nan
    offsets = np.concatenate([[0], offsets, np.full(S - count, offsets[-1])])
    if kind.expanded:
        arrays["v"] = expanded(arrays["v"])
    if kind.alibi:
        arrays["slopes"] = rng.random(HEADS, np.float32)
    return arrays | {"offsets": offsets.astype(np.int32), "count": np.array([count], np.int32)}


def arguments_of(x: dict[str, Any], kind: Kind) -> dict[str, Any]:
    """Those of flash_attn_varlen_func."""
    lengths = {
        "max_seqlen_q": T,
        "max_seqlen_k": T,
        "cu_seqlens_q": x["offsets"],
        "cu_seqlens_k": x["offsets"],
    }
    options = {"causal": True, "num_seqs": x["count"], "deterministic": kind.deterministic}
    if kind.alibi:
        options["alibi_slopes"] = x["slopes"]
    return {name: x[name] for name in SOURCES} | lengths | options


def check(now: dict[str, np.ndarray], kind: Kind, out: np.ndarray, grads: tuple[np.ndarray, ...]) -> None:
    expected = gradients_from(arguments_of(now, kind), out, now["grad"])
    for name, gradient in zip(SOURCES, grads, strict=True):
        assert_gradients(gradient, expected[name], np.dtype(kind.dtype), name, "cuda")


@pytest.mark.parametrize("name", KINDS)
def test_torch_graph(torch: Any, rng: np.random.Generator, name: str) -> None:
    """Forward and backward, replayed after offsets and num_seqs changed in place."""
    kind, frontend = KINDS[name], TorchFrontend("cuda")
    inputs = {key: frontend.tensor(array) for key, array in documents(rng, kind).items()}
    served = flashxla.explain(frontend.fx.flash_attn_varlen_func, **arguments_of(inputs, kind)).gradients
    assert served is not None and served.kernels[0].name == kind.engine, served
    sources = [inputs[source].requires_grad_() for source in SOURCES]

    def run() -> tuple[Any, ...]:
        out = frontend.fx.flash_attn_varlen_func(**arguments_of(inputs, kind))
        return out, *torch.autograd.grad(out, sources, inputs["grad"])

    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        run()
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    for _ in range(4):
        now = documents(rng, kind)
        with torch.no_grad():
            for key, array in now.items():
                to = inputs[key][:, :1] if key == "v" and kind.expanded else inputs[key]
                to.copy_(frontend.tensor(stored(array)))
        graph.replay()
        out, *grads = map(frontend.array, results)
        check(now, kind, out, tuple(grads))
        if kind.deterministic:
            graph.replay()
            for source, gradient, again in zip(SOURCES, grads, results[1:], strict=True):
                assert_same_bits(frontend.array(again), gradient, source)


@pytest.mark.parametrize("name", KINDS)
def test_jax_command_buffers(jax: Any, rng: np.random.Generator, name: str) -> None:
    """A jitted step, which XLA records into a CUDA graph, with other documents in each call."""
    import flashxla.jax as fx

    kind = KINDS[name]

    @jax.jit
    def step(x: dict[str, Any]) -> Any:
        def function(sources: dict[str, Any]) -> Any:
            return fx.flash_attn_varlen_func(**(arguments_of(x, kind) | sources))

        out, pullback = jax.vjp(function, {source: x[source] for source in SOURCES})
        return out, pullback(x["grad"])[0]

    for _ in range(6):
        now = documents(rng, kind)
        out, grads = step(now)
        check(now, kind, np.asarray(out), tuple(np.asarray(grads[source]) for source in SOURCES))


def test_torch_other_stream(torch: Any, rng: np.random.Generator) -> None:
    """The backward pass runs on the stream of the forward pass, behind what is there."""
    kind, frontend = KINDS["wide"], TorchFrontend("cuda")
    now = documents(rng, kind)
    late = {key: frontend.tensor(array) for key, array in now.items()}
    inputs = {key: torch.zeros_like(x) for key, x in late.items()}
    sources = [inputs[source].requires_grad_() for source in SOURCES]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)
        with torch.no_grad():
            for key, x in late.items():
                inputs[key].copy_(x)
        out = frontend.fx.flash_attn_varlen_func(**arguments_of(inputs, kind))
    grads = torch.autograd.grad(out, sources, inputs["grad"])
    torch.cuda.synchronize()
    check(now, kind, frontend.array(out), tuple(map(frontend.array, grads)))
