"""Whole programs on TorchTPU give what they give on the CPU: transformers models, training, saving, random numbers."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import transformers

from tests.torchtpu import device

device.start()

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
MODELS = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen3": (transformers.Qwen3Config, {}),
    "gemma3": (transformers.Gemma3TextConfig, {"sliding_window": 8}),
}


def build(name: str) -> Any:
    """A model on the CPU, and its copy on TorchTPU's device."""
    config, more = MODELS[name]
    model = transformers.AutoModelForCausalLM.from_config(config(**SIZES, **more), attn_implementation="sdpa")
    on_tpu = copy.deepcopy(model).to("tpu")
    on_tpu.tie_weights()
    return model, on_tpu


def losses(model: Any, step: Any, device: str, steps: int, dtype: torch.dtype | None = None) -> list[float]:
    """Of training steps with AdamW, the same batches at each call."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator, seen = torch.Generator().manual_seed(1), []
    model.train()
    for _ in range(steps):
        ids = torch.randint(0, 64, (4, 16), generator=generator).to(device)
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            loss = step(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach().float().cpu().item())
    return seen


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits(name: str) -> None:
    model, on_tpu = build(name)
    ids, mask = torch.randint(0, 256, (2, 12)), torch.ones(2, 12, dtype=torch.int64)
    mask[0, :4] = 0
    torch.testing.assert_close(on_tpu(ids.to("tpu")).logits.cpu(), model(ids).logits, atol=1e-5, rtol=1e-4)
    expected = model(ids, attention_mask=mask).logits
    got = on_tpu(ids.to("tpu"), attention_mask=mask.to("tpu")).logits.cpu()
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "compiled", "dtype", "tolerance"),
    [
        ("llama", False, None, 1e-4),
        ("llama", True, None, 1e-4),
        ("llama", False, torch.bfloat16, 0.01),
        ("qwen3", True, None, 1e-4),
        ("gemma3", True, None, 1e-4),
    ],
    ids=["llama-eager", "llama-compiled", "llama-autocast", "qwen3-compiled", "gemma3-compiled"],
)
def test_training(name: str, compiled: bool, dtype: torch.dtype | None, tolerance: float) -> None:
    torch._dynamo.reset()
    model, on_tpu = build(name)
    step = torch.compile(on_tpu, backend="tpu") if compiled else on_tpu
    got = losses(on_tpu, step, "tpu", 50, dtype)
    assert got == pytest.approx(losses(model, model, "cpu", 50, dtype), rel=tolerance)
    assert got[-1] < 0.9 * got[0]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_seeds_of_dropout(compiled: bool) -> None:
    def drop(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.4)

    function = torch.compile(drop, backend="tpu") if compiled else drop
    x = torch.ones(10000).to("tpu")
    drawn = []
    for seed in (3, 4, 3):
        torch.manual_seed(seed)
        drawn.append([function(x).cpu() for _ in range(2)])
    for first, second in zip(drawn[0], drawn[2], strict=True):
        assert torch.equal(first, second)
    assert not torch.equal(drawn[0][0], drawn[0][1])
    assert not torch.equal(drawn[0][0], drawn[1][0])
    assert (drawn[0][0] == 0).float().mean().item() == pytest.approx(0.4, abs=0.02)


def test_saving_and_loading() -> None:
    model = torch.nn.Linear(4, 4).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4).to("tpu")).sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    for place in ("cpu", "tpu"):
        file.seek(0)
        saved = torch.load(file, map_location=place)
        for name, x in model.state_dict().items():
            assert saved["model"][name].device.type == place
            assert torch.equal(saved["model"][name].cpu(), x.cpu())
        other = torch.optim.AdamW(torch.nn.Linear(4, 4).to(place).parameters())
        other.load_state_dict(saved["optimizer"])
        moment = other.state_dict()["state"][0]["exp_avg"].cpu()
        assert torch.equal(moment, optimizer.state_dict()["state"][0]["exp_avg"].cpu())


def test_data_loader() -> None:
    loader = torch.utils.data.DataLoader(torch.arange(10.0), batch_size=5, num_workers=1)
    assert [x.to("tpu").sum().item() for x in loader] == [10.0, 35.0]


def test_profiler() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        (torch.ones(4, 4).to("tpu") @ torch.ones(4, 4).to("tpu")).cpu()
    assert "aten::mm" in {event.key for event in profile.key_averages()}
