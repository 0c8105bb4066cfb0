"""Lengths under torch.compile: one graph serves many, also where max_seqlen_q is a tensor's size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests import reference
from tests.checks import TOLERANCE, assert_close
from tests.frontends import TorchFrontend

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 16, 8
LENGTHS = (5, 6, 7, 12, 40)


def arguments(rng: np.random.Generator, length: int, paged: bool) -> dict[str, Any]:
    """One sequence of a length, all of it new."""
    kv = (-(-length // PAGE), PAGE, KV_HEADS, DIM) if paged else (length, KV_HEADS, DIM)
    offsets = np.array([0, length], np.int32)
    index = {"cu_seqlens_k": offsets}
    if paged:
        index = {
            "seqused_k": offsets[1:],
            "block_table": np.arange(kv[0], dtype=np.int32)[None],
        }
    return {
        "q": rng.standard_normal((length, HEADS, DIM), np.float32),
        "k": rng.standard_normal(kv, np.float32),
        "v": rng.standard_normal(kv, np.float32),
        "cu_seqlens_q": offsets,
        **index,
    }


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("mark", [False, True], ids=["automatic", "mark_dynamic"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
def test_a_graph_serves_many_lengths(
    frontend: TorchFrontend, rng: np.random.Generator, paged: bool, backend: str, mark: bool
) -> None:
    torch = frontend.torch
    graphs = []

    def count(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return torch._dynamo.backends.registry.lookup_backend(backend)(module, inputs)

    def function(tensors: dict[str, Any]) -> Any:
        keys = tensors["block_table"].shape[1] * PAGE if paged else tensors["k"].shape[0]
        return frontend.fx.flash_attn_varlen_func(
            max_seqlen_q=tensors["q"].shape[0], max_seqlen_k=keys, causal=True, **tensors
        )

    def check(length: int, compiled: Any) -> None:
        given = arguments(rng, length, paged)
        tensors = {name: frontend.tensor(array) for name, array in given.items()}
        if mark:  # an error, if the length becomes a constant
            torch._dynamo.mark_dynamic(tensors["q"], 0)
        out = frontend.array(compiled(tensors))
        expected, _ = reference.flash_attn_varlen_func(
            max_seqlen_q=length, max_seqlen_k=length, causal=True, **given
        )
        assert_close(out, expected, TOLERANCE["f32"])

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=count, fullgraph=True)
    # PyTorch's default, which torch_xla switches off for the whole process.
    with torch._dynamo.config.patch(automatic_dynamic_shapes=True):
        for length in LENGTHS:
            check(length, compiled)
    # The first length, then all; one more where the number of pages, 1 at first, begins to vary.
    assert len(graphs) <= 2 + int(paged)
