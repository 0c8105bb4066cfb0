"""What masks say: that decides, whatever the layer's class has."""

from __future__ import annotations

import gc
import types
from typing import Any

import pytest
import torch
import transformers
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from flashxla.transformers import interface, masks, once, statements
from tests.transformers.conftest import Make, drawn
from tests.transformers.test_models import GREEDY, MASKS, each, ids_of

CAUSAL = {"mask_function": causal_mask_function}
BIDIRECTIONAL = {
    "mask_function": bidirectional_mask_function,
    "allow_is_causal_skip": False,
    "allow_is_bidirectional_skip": True,
}
SAYS = {"nothing": {}, "causal": {"is_causal": True}, "bidirectional": {"is_causal": False}}


def attended(
    mask: torch.Tensor | None, queries: int, keys: int, rows: int = 3, **module: Any
) -> torch.Tensor:
    """[B, H, S, D]"""
    query, key, value = (drawn(torch.randn, i, rows, 2, n, 16) for i, n in enumerate((queries, keys, keys)))
    layer: Any = types.SimpleNamespace(**module)
    return interface.attention(layer, query, key, value, mask)[0].transpose(1, 2)


def expected(seen: torch.Tensor, queries: int, keys: int, rows: int = 3) -> torch.Tensor:
    query, key, value = (drawn(torch.randn, i, rows, 2, n, 16) for i, n in enumerate((queries, keys, keys)))
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)


@pytest.mark.parametrize("layer", SAYS)
@pytest.mark.parametrize("asked", [CAUSAL, BIDIRECTIONAL], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("mask", ["none", "ones", "left", "right", "holes"])
def test_the_mask_decides(mask: str, asked: dict[str, Any], layer: str) -> None:
    length = 21
    tokens = torch.tensor(MASKS.get(mask) or [[1] * length] * 3).bool()
    given = {} if mask == "none" else {"attention_mask": tokens}
    got = attended(masks.spans(3, length, length, **asked, **given), length, length, **SAYS[layer])
    seen = tokens[:, None, None].expand(-1, 1, length, -1)
    if asked is CAUSAL:
        seen = seen & torch.ones(length, length, dtype=torch.bool).tril()
    there = tokens[:, None, :, None]
    torch.testing.assert_close(got * there, (expected(seen, length, length) * there).nan_to_num())


def test_without_a_mask_the_layer_decides() -> None:
    every = torch.ones(5, 5, dtype=torch.bool)
    torch.testing.assert_close(attended(None, 5, 5, is_causal=False), expected(every, 5, 5))
    torch.testing.assert_close(attended(None, 5, 5, is_causal=True), expected(every.tril(), 5, 5))
    with pytest.raises(ValueError, match=r"SimpleNamespace says nothing of is_causal, .*; accepted: one of"):
        attended(None, 5, 5)


@pytest.mark.parametrize("of_the_cache", [False, True])
@pytest.mark.parametrize("given", MASKS)
def test_who_asks_for_a_whole_mask(monkeypatch: pytest.MonkeyPatch, given: str, of_the_cache: bool) -> None:
    """A model, which is refused, or, in transformers 5.6, any static cache."""
    monkeypatch.setattr(masks, "_MODELS_ASK", not of_the_cache)
    tokens = None if MASKS[given] is None else torch.tensor(MASKS[given]).bool()
    length = 7 if tokens is None else tokens.shape[1]
    asked = {"attention_mask": tokens, "allow_is_causal_skip": False, **CAUSAL}
    if not of_the_cache:
        with pytest.raises(ValueError, match="with a place for each query"):
            masks.spans(3, length, length, **asked)
        return
    got = attended(masks.spans(3, length, length, **asked), length, length, is_causal=True)
    plain = {"attention_mask": tokens, **CAUSAL}
    wanted = attended(masks.spans(3, length, length, **plain), length, length, is_causal=True)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("given", [None, torch.ones(3, 5).bool(), torch.tensor(MASKS["left"])[:, 3:8].bool()])
def test_as_many_keys_as_the_mask(given: torch.Tensor | None) -> None:
    mask = masks.spans(3, 5, 5, attention_mask=given)
    assert attended(mask, 5, 5, is_causal=True).shape == (3, 2, 5, 16)
    message = (
        r"SimpleNamespace attends to 7 keys, and asked for a mask of 5; accepted: as many\. Load .*eager"
    )
    with pytest.raises(ValueError, match=message):
        attended(mask, 5, 7, is_causal=True)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_callers_mask_of_one_query(rows: int) -> None:
    """For each row of the batch, or one for all."""
    seen = torch.tensor(MASKS["holes"])[:rows, None, None].bool()
    torch.testing.assert_close(attended(seen, 1, 21), expected(seen, 1, 21))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_a_callers_mask_of_numbers(dtype: torch.dtype) -> None:
    """Four of them, as spans are."""
    message = (
        rf"got a mask \[3, 1, 1, 4\] of {dtype} for 1 queries and 4 keys; accepted: .* bool \[batch, 1, 1,"
    )
    with pytest.raises(ValueError, match=message):
        attended(torch.ones(3, 1, 1, 4, dtype=dtype), 1, 4)


@pytest.mark.parametrize("queries", [1, 2, 3, 4])
def test_no_callers_mask_is_a_statement(queries: int) -> None:
    for heads in range(1, 9):
        for mask_queries in {1, queries}:
            for dtype in (torch.bool, torch.int32):
                assert not statements.is_statement(torch.ones(3, heads, mask_queries, 5).to(dtype), queries)
    assert statements.is_statement(masks.spans(3, queries, 5), queries)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mask_written_between_steps(make_model: Make, mode: Any) -> None:
    """As a loop over a static cache may do it."""
    model, ids = make_model("llama"), ids_of(2)

    def run() -> torch.Tensor:
        with mode():
            cache = transformers.StaticCache(config=model.config, max_cache_len=16)
            model(ids[:, :10], past_key_values=cache)
            mask = torch.zeros(2, 1, 1, 16, dtype=torch.bool)
            mask[..., 2:10] = True
            steps = []
            for i in range(10, 13):
                mask[..., i] = True
                arguments = {"attention_mask": mask, "position_ids": torch.tensor([[i]])}
                steps.append(model(ids[:, i : i + 1], past_key_values=cache, **arguments).logits)
        return torch.cat(steps)

    model.set_attn_implementation("sdpa")  # eager attention adds a mask of bool
    want = run()
    model.set_attn_implementation("flashxla")
    got = run()
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("mask", ["left", "holes"])
def test_what_is_made_of_a_mask_goes_with_it(make_model: Make, mask: str, rows: int) -> None:
    model = make_model("mistral")
    model.set_attn_implementation("flashxla")
    tokens = torch.tensor(MASKS[mask])[:rows]
    run = lambda: model.generate(ids_of(rows), attention_mask=tokens, **GREEDY)  # noqa: E731
    run()
    gc.collect()
    before = len(once._MADE)
    run()
    gc.collect()
    assert len(once._MADE) <= before


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("mask", ["left", "holes"])
def test_encoders_that_generate(make_model: Make, mask: str, cache: str) -> None:
    """transformers makes a causal mask for them where the cache is static, and they none where it is dynamic."""
    config = transformers.BertConfig(
        vocab_size=259,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        initializer_range=0.5,
    )
    model, ids, tokens = make_model(config), ids_of(), torch.tensor(MASKS[mask])
    assert not model.config.is_decoder
    want, got = each(
        model, lambda: model.generate(ids, attention_mask=tokens, cache_implementation=cache, **GREEDY)
    )
    assert torch.equal(got, want)
