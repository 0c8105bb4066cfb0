"""transformers' continuous batching over its own paged cache, against generation without one."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import CompileConfig, ContinuousBatchingConfig

from tests.transformers.conftest import Make

GREEDY = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": 257, "pad_token_id": 258}
PROMPTS = [torch.randint(0, 250, (n,)).tolist() for n in (5, 40, 17, 3, 29, 61)]
# Prompts are cut into chunks of at most 48 tokens. With 24 blocks of 8 the six do not all fit at once.
SMALL = {"num_blocks": 24, "page_size": 8, "max_batch_tokens": 48}
CASES: dict[str, dict[str, Any]] = {
    "chunks": SMALL,
    "large pages": {"num_blocks": 8, "page_size": 64, "max_batch_tokens": 256},
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
    options = CASES[case]
    if family in ("mixtral", "gpt_oss"):
        options = options | {
            "use_cuda_graph": False
        }  # PyTorch's products of experts in float32 cannot be captured
    assert generate_batch(model, **options) == generate_one_by_one(model)


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
