"""CUDA graphs and streams: one recording serves every batch of its padded shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashxla
from tests.cuda import steps
from tests.frontends import TorchFrontend


class TorchStep:
    """A step in PyTorch, on buffers that stay."""

    def __init__(self, rng: np.random.Generator, op: str, kind: str) -> None:
        self.frontend = TorchFrontend("cuda")
        self.op = op
        self.page = steps.KINDS[kind].page
        self.caches = tuple(map(self.frontend.tensor, steps.empty_caches(rng, kind)))
        first = dataclasses.asdict(steps.step(rng, kind))
        self.inputs = {name: self.frontend.tensor(array) for name, array in first.items()}
        self.out: Any = None

    def set(self, now: steps.Step) -> None:
        for name, array in dataclasses.asdict(now).items():
            self.inputs[name].copy_(self.frontend.tensor(array))

    def call(self) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The function that attends, and its arguments."""
        fx, x = self.frontend.fx, self.inputs
        meta = (x["lengths"], x["table"], x["starts"], x["num_seqs"])
        if self.op == "ragged_paged_attention":
            new = (x["key"], x["value"])
            return fx.ragged_paged_attention, (x["query"], *new, self.caches, *meta, steps.SCALE), {}
        if self.op == "paged_attention":
            return fx.paged_attention, (x["query"], self.caches, *meta, steps.SCALE), {}
        arguments = (x["query"], *self.caches, steps.T, x["starts"], steps.M * self.page)
        named = {"seqused_k": x["lengths"], "block_table": x["table"], "num_seqs": x["num_seqs"]}
        return fx.flash_attn_varlen_func, arguments, named | {"softmax_scale": steps.SCALE, "causal": True}

    def run(self) -> None:
        x = self.inputs
        if self.op != "ragged_paged_attention":
            self.frontend.fx.reshape_and_cache_flash(x["key"], x["value"], *self.caches, x["slots"])
        function, arguments, named = self.call()
        self.out = function(*arguments, **named)

    def check(self, now: steps.Step, run: Callable[[], None]) -> None:
        old = tuple(map(self.frontend.array, self.caches))
        self.set(now)
        run()
        new = tuple(map(self.frontend.array, self.caches))
        steps.check(now, old, new, self.frontend.array(self.out))


@pytest.mark.parametrize("kind", steps.KINDS)
@pytest.mark.parametrize("op", ["flash_attn_varlen_func", "paged_attention", "ragged_paged_attention"])
def test_torch_graph(torch: Any, rng: np.random.Generator, op: str, kind: str) -> None:
    """Replays after lengths, tables, slots and num_seqs changed in place."""
    state = TorchStep(rng, op, kind)
    function, arguments, named = state.call()
    served = flashxla.explain(function, *arguments, **named)
    assert served.many_queries.startswith(steps.KINDS[kind].engine), served
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        state.run()
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state.run()
    for _ in range(4):
        state.check(steps.step(rng, kind), graph.replay)


def test_torch_side_stream(torch: Any, rng: np.random.Generator) -> None:
    """Work goes to the current stream: behind what is there, and not to the default one."""
    state = TorchStep(rng, "paged_attention", "mixed")
    now = steps.step(rng, "mixed")
    state.run()  # loading a kernel waits for the device
    old = tuple(map(state.frontend.array, state.caches))
    arrays = {name: state.frontend.tensor(array) for name, array in dataclasses.asdict(now).items()}
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000_000)  # a second: the inputs come late, whatever else is loading
        for name, array in arrays.items():
            state.inputs[name].copy_(array)
        state.run()
    assert not stream.query()
    torch.cuda.default_stream().synchronize()
    stream.synchronize()
    new = tuple(map(state.frontend.array, state.caches))
    steps.check(now, old, new, state.frontend.array(state.out))


def test_torch_other_device(torch: Any, rng: np.random.Generator) -> None:
    """Tensors on a device that is not the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    state = TorchStep(rng, "paged_attention", "mixed")
    state.inputs = {name: x.to("cuda:1") for name, x in state.inputs.items()}
    state.caches = tuple(x.to("cuda:1") for x in state.caches)
    state.check(steps.step(rng, "mixed"), state.run)
    assert torch.cuda.current_device() == 0


def jax_layers(fx: Any, count: int, fused: bool) -> Callable[..., Any]:
    """fused: a layer is one call."""

    def program(x: dict[str, Any], caches: Any) -> Any:
        outs, new = [], []
        for cache in caches[:count]:
            key_value, meta = (x["key"], x["value"]), (x["lengths"], x["table"], x["starts"], x["num_seqs"])
            if fused:
                out, cache = fx.ragged_paged_attention(x["query"], *key_value, cache, *meta, steps.SCALE)
            else:
                cache = fx.reshape_and_cache_flash(*key_value, *cache, x["slots"])
                out = fx.paged_attention(x["query"], cache, *meta, steps.SCALE)
            outs.append(out)
            new.append(cache)
        return outs, new

    return program


FUSED = pytest.mark.parametrize("fused", [False, True], ids=["two calls", "one call"])


@FUSED
@pytest.mark.parametrize("kind", steps.KINDS)
def test_jax_command_buffers(jax: Any, rng: np.random.Generator, kind: str, fused: bool) -> None:
    """A jitted step, which XLA records into a CUDA graph, with other index tensors in each call."""
    import flashxla.jax as fx

    program = jax.jit(jax_layers(fx, 2, fused), donate_argnums=1)
    caches = [tuple(map(jax.numpy.asarray, steps.empty_caches(rng, kind))) for _ in range(2)]
    pointers = [x.unsafe_buffer_pointer() for pair in caches for x in pair]
    for _ in range(6):
        now = steps.step(rng, kind)
        old = [tuple(np.array(x) for x in pair) for pair in caches]
        outs, caches = program(dataclasses.asdict(now), caches)
        assert [x.unsafe_buffer_pointer() for pair in caches for x in pair] == pointers
        for out, before, after in zip(outs, old, caches, strict=True):
            steps.check(now, before, tuple(map(np.asarray, after)), np.asarray(out))


@FUSED
def test_jax_layers_share_a_plan(jax: Any, rng: np.random.Generator, fused: bool) -> None:
    import flashxla.jax as fx
    from flashxla.doctor import hlo

    caches = [tuple(map(jax.numpy.asarray, steps.empty_caches(rng, "mixed"))) for _ in range(3)]
    now = dataclasses.asdict(steps.step(rng, "mixed"))
    compiled = jax.jit(jax_layers(fx, 3, fused), donate_argnums=1).lower(now, caches).compile()
    program = hlo.Program("layers", compiled.as_text(), 0)
    targets = program.targets()
    assert targets.count("flashxla_attention_plan") == 1
    assert targets.count("flashxla_attention") == 3
    assert targets.count("flashxla_kv_cache") == (0 if fused else 3)
    assert program.copies(at_least=caches[0][0].nbytes) == []


def test_torch_writes_are_in_place(torch: Any) -> None:
    from flashxla.doctor import probe

    assert probe.run("torch_cuda").in_place
