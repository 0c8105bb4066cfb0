"""transformers' continuous batching over its own paged cache, against generation without one."""

from __future__ import annotations

import re
import types
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import CompileConfig, ContinuousBatchingConfig

from flashxla.transformers import interface
from tests.transformers.conftest import Make, drawn

GREEDY = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": 257, "pad_token_id": 258}
PROMPTS = [torch.randint(0, 250, (n,)).tolist() for n in (5, 40, 17, 3, 29, 61)]
# Prompts are cut into chunks of at most 48 tokens. With 24 blocks of 8 the six do not all fit at once.
SMALL = {"num_blocks": 24, "page_size": 8, "max_batch_tokens": 48, "use_cuda_graph": False}
CASES: dict[str, dict[str, Any]] = {
    "chunks": SMALL,
    "large pages": {"num_blocks": 8, "page_size": 64, "max_batch_tokens": 256, "use_cuda_graph": False},
    "unshared": {**SMALL, "allow_block_sharing": False},
}


def generate_one_by_one(model: Any) -> dict[tuple[int, ...], list[int]]:
    model.set_attn_implementation("eager")
    config = GenerationConfig(**GREEDY)
    return {
        tuple(p): model.generate(torch.tensor([p]), generation_config=config)[0, len(p) :].tolist()
        for p in PROMPTS
    }


def generate_batch(model: Any, **options: Any) -> dict[tuple[int, ...], list[int]]:
    model.set_attn_implementation("flashxla")
    outputs = model.generate_batch(
        PROMPTS,
        generation_config=GenerationConfig(**GREEDY),
        continuous_batching_config=ContinuousBatchingConfig(**options),
        progress_bar=False,
    )
    assert model.config._attn_implementation == "flashxla"
    return {tuple(output.prompt_ids): output.generated_tokens for output in outputs.values()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "mixtral", "gpt_oss"]
)
def test_tokens(make_model: Make, family: str, case: str) -> None:
    model = make_model(family)
    assert generate_batch(model, **CASES[case]) == generate_one_by_one(model)


def test_shared_prefixes(make_model: Make) -> None:
    """Requests that begin alike share their first blocks, which nobody may write again."""
    model = make_model("llama")
    start = PROMPTS[5]
    prompts = [start + PROMPTS[3], start + PROMPTS[0], start]
    with mock.patch(f"{__name__}.PROMPTS", prompts):
        assert generate_batch(model, **SMALL | {"num_blocks": 48}) == generate_one_by_one(model)


def test_compiled_without_a_break_or_a_copy(make_model: Make) -> None:
    """transformers' own update of the cache cannot be compiled: functionalization would copy the cache."""
    from torch._inductor.graph import GraphLowering

    codes: list[str] = []
    model = make_model("gemma2")  # with layers of both kinds
    compile_config = CompileConfig(fullgraph=True, dynamic=True, mode="default")
    with mock.patch.object(GraphLowering, "save_output_code", codes.append):
        got = generate_batch(model, **SMALL, varlen_compile_config=compile_config)
    assert got == generate_one_by_one(model)
    calls = re.findall(r"torch\.ops\.flashxla\._?(\w+)\.default\((.*)\)", "\n".join(codes))
    written = [
        arguments for name, arguments in calls if name in ("ragged_paged_attention", "reshape_and_cache")
    ]
    assert len(written) >= len(model.model.layers)
    # Each writes into an argument of the program, seen as a whole.
    for arguments in written:
        assert re.search(r"reinterpret_tensor\(arg\d+_1, \(2, ", arguments), arguments


@pytest.mark.parametrize("window", [None, 8])
def test_the_cache_of_transformers_5_6(window: int | None) -> None:
    """A tensor for each layer's keys and one for its values, in which rows are numbered without the values' pages."""
    size, pages, sentinel = 4, 12, 47
    shape = (pages * size, 2, 16)
    kind = "full_attention" if window is None else "sliding_attention"
    keys, values = ([drawn(torch.randn, 2 * i + j, *shape) for j in range(2)] for i in range(2))
    cache = types.SimpleNamespace(
        block_size=size,
        key_cache=keys,
        value_cache=values,
        layer_index_to_group_indices={3: (1, 1)},
        sliding_windows={3: window or 1},
        sentinel_index=sentinel,
    )
    # Two sequences of 9 and 5 keys, of which 2 and 1 are new.
    rows = [[0, 1, 2, 3, 20, 21, 22, 23, 8], [12, 13, 14, 15, 4]]
    new = [2, 1]
    reads = rows if window is None else [[*r[:-n], *[sentinel] * n] for r, n in zip(rows, new, strict=True)]
    writes = [row for r, n in zip(rows, new, strict=True) for row in r[-n:]]
    query, key, value = (drawn(torch.randn, 4 + i, 1, heads, 3, 16) for i, heads in enumerate((4, 2, 2)))

    expected = []
    held = [
        x[1].clone().index_copy_(0, torch.tensor(writes), n[0].transpose(0, 1))
        for x, n in ((keys, key), (values, value))
    ]
    for r, part in zip(rows, query[0].split(new, dim=1), strict=True):
        k, v = (x[r].repeat_interleave(2, dim=1).transpose(0, 1) for x in held)
        distance = torch.arange(len(r))[-part.shape[1] :, None] - torch.arange(len(r))
        seen = (distance >= 0) & (distance < (window or len(r)))
        out = torch.nn.functional.scaled_dot_product_attention(part, k, v, attn_mask=seen)
        expected.append(out.transpose(0, 1))

    offsets = torch.tensor([0, 9, 14], dtype=torch.int32)
    got, _ = interface.attention(
        types.SimpleNamespace(layer_idx=3),
        query,
        key,
        value,
        None,
        cache=cache,
        cu_seq_lens_q=torch.tensor([0, 2, 3], dtype=torch.int32),
        # By kind of layers, if there are several.
        cu_seq_lens_k=offsets if window is None else {kind: offsets},
        max_seqlen_q=2,
        max_seqlen_k=9 if window is None else {kind: 9},
        read_index=[None, torch.tensor([row for r in reads for row in r])],
        write_index=[None, torch.tensor(writes)],
        sliding_window=window,
    )
    torch.testing.assert_close(got[0], torch.cat(expected))
    assert torch.equal(keys[1], held[0])
    assert torch.equal(values[1], held[1])


@pytest.mark.parametrize("compiled", [False, True])
def test_cuda_graphs_are_refused(
    compiled: bool, make_model: Make, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr("flashxla.transformers.continuous_batching.capturing", lambda tensor: True)
    how = {"varlen_compile_config": CompileConfig(fullgraph=True, dynamic=True)} if compiled else {}
    tokens = generate_batch(make_model("llama"), **SMALL | how)
    assert not any(tokens.values())
    assert "use_cuda_graph=False" in caplog.text
