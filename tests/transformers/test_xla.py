"""Models on PyTorch/XLA's tensors."""

from __future__ import annotations

import pytest
import torch

from tests.transformers.conftest import Make
from tests.transformers.test_models import GREEDY, MASKS, ids_of

torch_xla = pytest.importorskip("torch_xla")


@pytest.mark.parametrize("mask_name", ["left", "holes"])
@pytest.mark.parametrize("family", ["gemma2"])
def test_generate(make_model: Make, family: str, mask_name: str) -> None:
    model = make_model(family)
    ids, tokens = ids_of(), torch.tensor(MASKS[mask_name])
    positions = (tokens.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(ids, attention_mask=tokens, position_ids=positions).logits * tokens[..., None]
        expected_tokens = model.generate(ids, attention_mask=tokens, **GREEDY)
        model.set_attn_implementation("flashxla")
        device = torch_xla.device()
        model.to(device).tie_weights()
        ids, mask, positions = (x.to(device) for x in (ids, tokens, positions))
        got = model(ids, attention_mask=mask, position_ids=positions).logits.cpu() * tokens[..., None]
        got_tokens = model.generate(ids, attention_mask=mask, **GREEDY).cpu()
    assert torch.equal(got_tokens, expected_tokens)
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)
