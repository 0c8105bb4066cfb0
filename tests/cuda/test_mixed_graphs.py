"""Prompts beside decode rows in a CUDA graph: the kernel of the prompts says on the device whether anything is left for
that of few queries, anew in each replay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashxla
from tests import reference
from tests.batches import normal
from tests.checks import DTYPES, assert_attention
from tests.frontends import TorchFrontend

PAGE, PAGES, SEQUENCES, TOKENS = 16, 40, 4, 500
HEADS, KV_HEADS, DIM = 8, 2, 128

# The queries of each sequence, and whether a page of one does not exist.
BATCHES = {
    "prompts": ((300, 200), False),
    "an unsound page": ((300, 200), True),
    "decode rows too": ((1, 300, 2, 197), False),
    "padding": ((64, 100), False),
    "decode rows alone": ((1, 1, 3, 1), False),
    "many prompts": ((100, 130, 170, 100), False),
    "nothing": ((), False),
}


def indices_of(rng: np.random.Generator, queries: tuple[int, ...], unsound: bool) -> dict[str, np.ndarray]:
    """Index tensors of the same shapes for each batch."""
    counts = [*queries, *[0] * (SEQUENCES - len(queries))]
    lengths = [count + int(rng.integers(0, PAGE * PAGES - count, endpoint=True)) for count in counts]
    table = rng.permutation(SEQUENCES * PAGES).reshape(SEQUENCES, PAGES)
    if unsound:
        table[0, rng.integers(0, 300 // PAGE)] = rng.choice([-1, SEQUENCES * PAGES])
    arrays = {
        "context_lens": np.array(lengths),
        "block_tables": table,
        "query_start_loc": np.cumsum([0, *counts]),
        "num_seqs": np.array([len(queries)]),
    }
    return {name: array.astype(np.int32) for name, array in arrays.items()}


@pytest.mark.parametrize("cache", ["bf16", "e4m3"])
def test_replays_of_other_batches(torch: Any, rng: np.random.Generator, cache: str) -> None:
    frontend = TorchFrontend("cuda")
    caches = tuple(normal(rng, (SEQUENCES * PAGES, PAGE, KV_HEADS, DIM), DTYPES[cache]) for _ in "kv")
    query = normal(rng, (TOKENS, HEADS, DIM), DTYPES["bf16"])
    fixed: dict[str, Any] = {"scale": DIM**-0.5, "layout": "NHD", "return_softmax_lse": True}
    now: dict[str, Any] = indices_of(rng, *BATCHES["prompts"])
    tensors = {name: frontend.tensor(array) for name, array in now.items()}
    named = {
        **tensors,
        **fixed,
        "query": frontend.tensor(query),
        "kv_cache": tuple(map(frontend.tensor, caches)),
        "max_seqlen_q": TOKENS,
    }
    served = flashxla.explain(frontend.fx.paged_attention, **named)
    assert [kernel.name for kernel in served.kernels] == ["swap", "wide"], served

    frontend.fx.paged_attention(**named)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = frontend.fx.paged_attention(**named)
    for name in rng.permutation([*BATCHES] * 4):
        now = indices_of(rng, *BATCHES[name])
        for key, array in now.items():
            tensors[key].copy_(frontend.tensor(array))
        out.fill_(float("nan")), lse.fill_(float("nan"))
        graph.replay()
        expected = reference.paged_attention(**{**now, **fixed, "query": query, "kv_cache": caches})
        assert_attention(frontend.array(out), frontend.array(lse), expected, DTYPES["bf16"])
