"""How many bytes the KV cache may take.

An engine owns gpu_memory_utilization of a device's memory. What its weights and the activations of its largest step
do not need is the cache's. `--kv-cache-memory-bytes` states the cache's size instead.
"""

from __future__ import annotations

from typing import Any

import psutil
import torch
import torch_xla.core.xla_model as xm
from vllm.config import VllmConfig
from vllm.logger import init_logger

from flashxla.machine import machine_bytes
from flashxla_vllm_legacy import device as devices

logger = init_logger("vllm.flashxla")

# Copies of a step's widest activations that XLA keeps at a time, and of the sampler's float32 logits. XLA needed 4.3
# of the first for a step of 8192 tokens of Llama 3 8B, under JAX.
_LIVE_ACTIVATIONS = 6
_LIVE_LOGITS = 4
_MEBI = 1 << 20


def available_for_cache(vllm_config: VllmConfig, device: torch.device) -> int:
    """Bytes for the KV cache.

    Raises:
        ValueError: nothing is left.
    """
    cache_config = vllm_config.cache_config
    if cache_config.kv_cache_memory_bytes:
        return int(cache_config.kv_cache_memory_bytes)
    owned, used = owned_and_used_bytes(device, cache_config.gpu_memory_utilization)
    reserve = activation_bytes(vllm_config)
    left = owned - used - reserve
    logger.info(
        "Memory of %s: %s owned, %s in use, %s reserved for activations, %s for the KV cache",
        xm.xla_real_devices([device])[0],
        *(f"{x / _MEBI:.0f} MiB" for x in (owned, used, reserve, left)),
    )
    if left <= 0:
        raise ValueError(
            f"No memory is left for the KV cache: of {owned / _MEBI:.0f} MiB (gpu_memory_utilization "
            f"{cache_config.gpu_memory_utilization}) {used / _MEBI:.0f} MiB are in use and {reserve / _MEBI:.0f} MiB "
            "are reserved for activations. Raise --gpu-memory-utilization, or lower --max-num-batched-tokens and "
            "--max-num-seqs."
        )
    return left


def owned_and_used_bytes(device: torch.device, utilization: float) -> tuple[int, int]:
    """What the engine may use of a device, and what is in use."""
    if devices.is_gpu():
        info: Any = xm.get_memory_info(device)
        # The limit is what XLA may allocate: a fraction of the GPU's memory.
        owned = int(info["bytes_limit"] / devices.memory_fraction() * utilization)
        return min(info["bytes_limit"], owned), info["bytes_used"]
    # PyTorch/XLA cannot tell a CPU's memory; others use it too.
    used = psutil.Process().memory_info().rss
    return min(int(machine_bytes() * utilization), used + psutil.virtual_memory().available), used


def activation_bytes(vllm_config: VllmConfig) -> int:
    """An estimate of what the largest step needs beside weights and cache, from the model's widths."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    text, hidden = model.hf_text_config, model.get_hidden_size()
    wide = max(getattr(text, name, None) or 0 for name in ("intermediate_size", "ffn_dim", "n_inner"))
    heads = text.num_attention_heads + 2 * model.get_total_num_kv_heads()
    widths = 4 * hidden + 2 * (wide or 4 * hidden) + heads * model.get_head_size()
    activations = scheduler.max_num_batched_tokens * widths * model.dtype.itemsize * _LIVE_ACTIVATIONS
    return activations + scheduler.max_num_seqs * model.get_vocab_size() * 4 * _LIVE_LOGITS
