"""Whole programs on TorchTPU give what they give on the CPU: transformers models, training, saving, random numbers."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable, Iterator
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


@pytest.fixture
def cumsum() -> Iterator[None]:
    """Which the CPU plugin, and no other, cannot compile."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        if os.environ["PJRT_DEVICE"] == "CPU":

            def sums(x: torch.Tensor, dim: int, *, dtype: Any = None) -> torch.Tensor:
                x = x.movedim(dim, -1).float()
                result = x @ torch.ones(x.shape[-1], x.shape[-1], device=x.device).triu()
                return result.movedim(-1, dim).to(dtype or torch.int64)

            library.impl("cumsum", sums, "PrivateUse1", allow_override=True)
        yield


@pytest.mark.parametrize("beams", [1, 2])
def test_generate(cumsum: None, beams: int) -> None:
    """Of transformers: greedy, and with beams, which move the cache's rows."""
    model, on_tpu = build("llama")
    ids = torch.randint(1, 256, (2, 7))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
    got = on_tpu.generate(ids.to("tpu"), attention_mask=mask.to("tpu"), **options)
    assert torch.equal(got.cpu(), model.generate(ids, attention_mask=mask, **options))


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


OPTIMIZERS = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True},
    "AdamW": {"fused": True},
    "Adafactor": {},
    "RMSprop": {},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_with_a_schedule_and_checkpointed_activations(name: str) -> None:
    torch.manual_seed(0)
    given = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    seen = []
    for place in ("cpu", "tpu"):
        model = copy.deepcopy(given).to(place)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **OPTIMIZERS[name])
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        for i in range(4):
            x = (torch.linspace(-1, 1, 8).view(2, 4) + i).to(place)
            out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
            (out**2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        seen.append([x.detach().cpu() for x in model.parameters()])
    for was, got, right in zip(given.parameters(), seen[1], seen[0], strict=True):
        # Most divide gradients by their size, which magnifies what rounding leaves of those near zero.
        torch.testing.assert_close(got, right, atol=1e-3, rtol=1e-4)
        assert (got - was).abs().max() > 5e-3


def scaled_step() -> None:
    model, scaler = torch.nn.Linear(2, 2).to("tpu"), torch.amp.GradScaler("tpu")
    optimizer = torch.optim.SGD(model.parameters())
    scaler.scale(model(torch.ones(1, 2).to("tpu")).sum()).backward()
    scaler.step(optimizer)


def weight_norm() -> None:
    layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2).to("tpu"))
    layer(torch.ones(1, 2).to("tpu")).sum().backward()


def compiled_cond() -> None:
    step = torch.compile(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), backend="tpu")
    step(torch.ones(2).to("tpu"))


LACKS: dict[str, tuple[Callable[[], Any], str]] = {
    "pin_memory": (lambda: torch.ones(2).pin_memory(), "host memory allocator"),
    "DLPack": (lambda: torch.from_dlpack(torch.ones(2).to("tpu")), "Unknown device type tpu"),
    "cholesky": (lambda: torch.linalg.cholesky(torch.eye(2).to("tpu")), "not implemented for TPU"),
    "GradScaler": (scaled_step, "not implemented for TPU"),
    "weight_norm": (weight_norm, "not implemented for TPU"),
    "cond": (compiled_cond, "during an FX trace"),
}


@pytest.mark.parametrize("name", LACKS)
def test_what_torchtpu_lacks(name: str) -> None:
    """Where this fails, TorchTPU has it now: say so in docs/torchtpu.md."""
    call, message = LACKS[name]
    with pytest.raises((RuntimeError, ValueError), match=message):
        call()


def test_data_loader() -> None:
    loader = torch.utils.data.DataLoader(torch.arange(10.0), batch_size=5, num_workers=1)
    assert [x.to("tpu").sum().item() for x in loader] == [10.0, 35.0]


def test_profiler() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        (torch.ones(4, 4).to("tpu") @ torch.ones(4, 4).to("tpu")).cpu()
    assert "aten::mm" in {event.key for event in profile.key_averages()}
