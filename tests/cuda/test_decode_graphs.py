"""Decode steps whose thread blocks combine partial results themselves (swap): in graphs, where a step has the same mark
each time that it runs, and in memory that other calls used before. Nobody clears the workspace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashxla
from tests import reference
from tests.batches import normal
from tests.checks import DTYPES, assert_attention
from tests.frontends import TorchFrontend

PAGE, PAGES = 16, 90


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a decode step."""

    sequences: int
    heads: tuple[int, int]
    dim: int
    cache: str = "bf16"
    queries: int = 1  # of each sequence

    @property
    def blocks(self) -> int:
        """Of the cache: some belong to nobody."""
        return self.sequences * PAGES + 3


# The second needs less memory than the first: it may get some of the same.
SHAPES = (
    Shape(20, (8, 2), 128),
    Shape(7, (16, 1), 64, "e4m3"),
    Shape(1, (4, 1), 256, queries=4),
    Shape(9, (12, 3), 100),  # threads copy the keys
)


def caches_of(rng: np.random.Generator, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    k, v = (normal(rng, (shape.blocks, PAGE, shape.heads[1], shape.dim), DTYPES[shape.cache]) for _ in "kv")
    return k, v


def inputs_of(rng: np.random.Generator, shape: Shape) -> dict[str, np.ndarray]:
    """Queries and index tensors of a step: lengths of every size, so that other blocks share other sequences."""
    sequences = shape.sequences
    most = int(rng.choice([20, 300, PAGES * PAGE]))
    lengths = rng.integers(0, most, sequences, endpoint=True)
    table = rng.permutation(shape.blocks)[: sequences * PAGES].reshape(sequences, PAGES)
    return {
        "query": normal(rng, (sequences * shape.queries, shape.heads[0], shape.dim), DTYPES["bf16"]),
        "context_lens": lengths.astype(np.int32),
        "block_tables": table.astype(np.int32),
        "query_start_loc": np.arange(0, sequences * shape.queries + 1, shape.queries, dtype=np.int32),
        "num_seqs": np.array([rng.integers(1, sequences, endpoint=True)], np.int32),
    }


def fixed(shape: Shape) -> dict[str, Any]:
    return {"scale": shape.dim**-0.5, "layout": "NHD", "return_softmax_lse": True}


class Decode:
    """A decode step in PyTorch, on buffers that stay."""

    def __init__(self, rng: np.random.Generator, shape: Shape, device: str = "cuda") -> None:
        self.frontend, self.rng, self.shape = TorchFrontend(device), rng, shape
        self.caches = caches_of(rng, shape)
        self.now = inputs_of(rng, shape)
        self.tensors = {name: self.frontend.tensor(array) for name, array in self.now.items()}
        self.tensors["kv_cache"] = tuple(map(self.frontend.tensor, self.caches))
        self.named = {**self.tensors, **fixed(shape), "max_seqlen_q": shape.queries}

    def explain(self) -> flashxla.Explanation:
        return flashxla.explain(self.frontend.fx.paged_attention, **self.named)

    def run(self) -> tuple[Any, Any]:
        result: tuple[Any, Any] = self.frontend.fx.paged_attention(**self.named)
        return result

    def change(self) -> None:
        """Other queries, lengths, tables and num_seqs in the same buffers."""
        self.now = inputs_of(self.rng, self.shape)
        for name, array in self.now.items():
            self.tensors[name].copy_(self.frontend.tensor(array))

    def check(self, results: tuple[Any, Any]) -> None:
        out, lse = map(self.frontend.array, results)
        check(self.now, self.caches, self.shape, out, lse)


def check(
    now: dict[str, np.ndarray], caches: tuple[np.ndarray, ...], shape: Shape, out: np.ndarray, lse: np.ndarray
) -> None:
    expected = reference.paged_attention(**now, kv_cache=caches, **fixed(shape))
    assert_attention(out, lse, expected, DTYPES["bf16"])


def poison(torch: Any, size: int) -> None:
    """Leave nonsense in the memory that the allocator is likely to give to the next workspace."""
    torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")


def states(rng: np.random.Generator) -> list[Decode]:
    made = [Decode(rng, shape) for shape in SHAPES]
    for state in made:
        served = state.explain()
        assert [(kernel.work, kernel.name) for kernel in served.kernels] == [("all queries", "swap")], served
    return made


@pytest.mark.parametrize("poisoned", [False, True], ids=["as it was left", "poisoned"])
def test_torch_graph(torch: Any, rng: np.random.Generator, poisoned: bool) -> None:
    """Each step twice, in turn, in one recording whose calls share memory: replayed with other lengths."""
    made = states(rng)
    for state in made:
        state.run()
    poison(torch, 1)
    torch.cuda.synchronize()
    graph, results = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for state in [*made, *made]:
            if poisoned:
                poison(torch, state.explain().workspace_bytes)
            results.append((state, state.run()))
    for _ in range(12):
        for state in made:
            state.change()
        for _, (out, lse) in results:
            out.fill_(float("nan")), lse.fill_(float("nan"))
        poison(torch, 1 << 26)
        graph.replay()
        for state, result in results:
            state.check(result)


@pytest.mark.parametrize("poisoned", [False, True], ids=["as it was left", "poisoned"])
def test_torch_calls_in_turn(torch: Any, rng: np.random.Generator, poisoned: bool) -> None:
    """Without a graph: the next call has the memory of the last one, which may still run."""
    made = states(rng)
    for _ in range(8):
        order = [made[i] for i in rng.integers(0, len(made), 6)]
        for state in made:
            state.change()
        results = []
        for state in order:
            if poisoned:
                poison(torch, state.explain().workspace_bytes)
            results.append((state, state.run()))
        for state, result in results:
            state.check(result)


def test_torch_replays_in_a_row(torch: Any, rng: np.random.Generator) -> None:
    """Nothing waits between the replays: each finds the marks that the last one left, and the bits are the same."""
    state = Decode(rng, SHAPES[0])
    first = state.run()
    state.check(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = state.run()
    for _ in range(50):
        out.fill_(float("nan")), lse.fill_(float("nan"))
        for _ in range(20):
            graph.replay()
        assert torch.equal(out.view(torch.int16), first[0].view(torch.int16))
        assert torch.equal(lse.view(torch.int32), first[1].view(torch.int32))


def jax_layers(fx: Any, shape: Shape, layers: int) -> Callable[..., Any]:
    def program(inputs: dict[str, Any], caches: Any) -> Any:
        given = {**inputs, **fixed(shape), "max_seqlen_q": shape.queries}
        return [fx.paged_attention(**given, kv_cache=caches[n]) for n in range(layers)]

    return program


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_jax_command_buffers(jax: Any, rng: np.random.Generator, shape: Shape) -> None:
    """Layers that share a plan and, as XLA likes it, a workspace; with other index tensors in each call."""
    import flashxla.jax as fx

    caches = [caches_of(rng, shape) for _ in range(3)]
    on_device = jax.device_put(caches)
    program = jax.jit(jax_layers(fx, shape, len(caches)))
    for _ in range(8):
        now = inputs_of(rng, shape)
        for (out, lse), of_layer in zip(program(now, on_device), caches, strict=True):
            check(now, of_layer, shape, np.asarray(out), np.asarray(lse))
