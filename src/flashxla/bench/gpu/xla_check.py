"""Whether a front end's step is right: the logits of one layer against PyTorch's on the CPU in float32."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch_xla

from flashxla.bench.gpu import step_sizes, xla_llama
from flashxla.bench.gpu.reference import WrongResult
from flashxla.bench.gpu.settings import Settings
from flashxla.bench.gpu.xla_frontends import Frontend


def logits_error(frontend: Frontend, settings: Settings) -> float:
    """The relative error of the logits, or of what was written into the caches if that is larger."""
    counts, keys = step_sizes.batches(settings)
    config = dataclasses.replace(step_sizes.config(settings), layers=1, vocab=512)
    dtype, device = getattr(torch, settings.dtype), torch_xla.device()
    batch = xla_llama.batch(counts[1], keys)
    params = xla_llama.init(config, dtype, device, torch_xla.sync)
    caches = xla_llama.caches(config, batch["tables"].numel(), dtype, device, torch_xla.sync)
    tokens = torch.arange(counts[1], dtype=torch.int32)
    torch_xla.sync(wait=True)
    # Before the step: it writes into the caches.
    exact_params, exact_caches = _exact(params), _exact(caches)
    right = xla_llama.step(config, xla_llama.gather, exact_params, exact_caches, tokens, batch)

    on_device = {name: tensor.to(device) for name, tensor in batch.items()}
    got = frontend.ready(xla_llama.step)(
        config, xla_llama.ours, params, caches, tokens.to(device), on_device
    ).cpu()
    pairs = [(got, right)]
    for cache, exact in zip(caches[0], exact_caches[0], strict=True):
        slots = batch["slots"].long()
        pairs.append((cache.cpu().flatten(0, 1)[slots], exact.flatten(0, 1)[slots]))
    torch._dynamo.reset()  # the timed step's guards are to be its own alone
    return max(_relative(*pair) for pair in pairs)


def _relative(got: torch.Tensor, right: torch.Tensor) -> float:
    error = float((got.float() - right).norm() / right.norm())
    if not error <= step_sizes.TOLERANCE:
        raise WrongResult(f"wrong result: relative error {error:.2g} of the logits or the keys of one layer")
    return error


def _exact(value: Any) -> Any:
    """The same numbers on the CPU, in float32."""
    if isinstance(value, torch.Tensor):
        return value.cpu().float()
    if isinstance(value, dict):
        return {name: _exact(one) for name, one in value.items()}
    return type(value)(_exact(one) for one in value)
