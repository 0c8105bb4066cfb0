"""How many bytes the KV cache may take.

An engine owns gpu_memory_utilization of a device's memory. What its weights and the activations of its largest step
do not need is the cache's. `--kv-cache-memory-bytes` states the cache's size instead.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import psutil
from vllm.config import VllmConfig
from vllm.logger import init_logger

from flashxla.machine import machine_bytes

logger = init_logger("vllm.flashxla")

_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_JAX_DEFAULT_FRACTION = 0.75
# Copies of a step's widest activations that XLA keeps at a time, and of the sampler's float32 logits. On an H200 XLA
# needed 4.3 of the first for a step of 8192 tokens of Llama 3 8B, and 12 of the second, while 4 more were arguments.
_LIVE_ACTIVATIONS = 6
_LIVE_LOGITS = 16
# The cache's bytes are a multiple of what the engine owns over this. Programs have the cache's shape in them: if it
# followed each byte in use, the next start would find none of its programs compiled.
_CACHE_PARTS = 256
_MEBI = 1 << 20
_KEPT_BY_PROGRAMS = 256 * _MEBI


def claim_device_memory(vllm_config: VllmConfig) -> None:
    """Let JAX allocate what the engine owns. Before JAX starts; a fraction in the environment stays."""
    os.environ.setdefault(_FRACTION, str(vllm_config.cache_config.gpu_memory_utilization))


def available_for_cache(vllm_config: VllmConfig, devices: Sequence[Any]) -> int:
    """Bytes for the KV cache on all devices together.

    Raises:
        ValueError: nothing is left.
    """
    cache_config = vllm_config.cache_config
    stated = cache_config.kv_cache_memory_bytes
    if stated:
        return int(stated) * len(devices)
    _settle()
    used = sum(used_bytes(device) for device in devices)
    owned = sum(owned_bytes(device, cache_config.gpu_memory_utilization) for device in devices)
    reserve = activation_bytes(vllm_config) * len(devices)
    left = owned - used - reserve
    part = max(owned // _CACHE_PARTS, 1)
    if left > part:
        left -= left % part
    logger.info(
        "Memory of %d device(s): %s owned, %s in use, %s reserved for activations, %s for the KV cache",
        len(devices),
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


def _settle() -> None:
    """Let go of arrays that only wait for a collection or for a computation: how many do varies from start to start."""
    gc.collect()
    jax.block_until_ready([array for array in jax.live_arrays() if not array.is_deleted()])


def hold_room_for_step(vllm_config: VllmConfig, devices: Sequence[Any]) -> list[jax.Array]:
    """Take the memory of the largest step's activations, in one piece behind the cache, while programs are compiled.

    The cache's own memory is free meanwhile, for the variants of products that XLA tries. What the programs keep is
    small. It must not come to lie in the cache's place, so a little memory stays free behind the piece: an allocator
    takes the smallest free block that is large enough.
    """
    pieces = []
    for device in devices:
        free = (device.memory_stats() or {}).get("largest_free_block_bytes", 0)  # a CPU has none to tell
        size = min(activation_bytes(vllm_config), free - _KEPT_BY_PROGRAMS)
        if size > 0:
            pieces.append(jnp.zeros(size, jnp.uint8, device=device))
    return jax.block_until_ready(pieces)


def check_room_for_step(step_bytes: int, devices: Sequence[Any]) -> None:
    """Check that the largest program's temporary memory, which is one piece, is free beside the cache.

    Raises:
        ValueError: it is not: the estimate of activation_bytes was too low for this model.
    """
    for device in devices:
        free = (device.memory_stats() or {}).get("largest_free_block_bytes", step_bytes)
        if free < step_bytes:
            raise ValueError(
                f"The largest step needs {step_bytes / _MEBI:.0f} MiB, and {free / _MEBI:.0f} MiB are free beside the "
                "KV cache. Lower --max-num-batched-tokens, or state a smaller cache by --kv-cache-memory-bytes."
            )


def owned_bytes(device: Any, utilization: float) -> int:
    """What the engine may use of a device."""
    limit = device_limit(device)
    if device.platform == "cpu":  # others use the memory too
        free = psutil.virtual_memory().available // len(jax.local_devices())
        return min(int(limit * utilization), used_bytes(device) + free)
    fraction = float(os.environ.get(_FRACTION, _JAX_DEFAULT_FRACTION))
    return min(
        limit, int(limit / fraction * utilization)
    )  # limit: what JAX may allocate, `fraction` of the device


def device_limit(device: Any) -> int:
    """The bytes that JAX may allocate on a device. The CPU's memory is split among its (virtual) devices."""
    if device.platform == "cpu":
        return machine_bytes() // len(jax.local_devices())
    return int(device.memory_stats()["bytes_limit"])


def used_bytes(device: Any) -> int:
    """The bytes in use: of a GPU by JAX; of the CPU, this device's share of the process."""
    if device.platform == "cpu":
        return psutil.Process().memory_info().rss // len(jax.local_devices())
    return int(device.memory_stats()["bytes_in_use"])


def activation_bytes(vllm_config: VllmConfig) -> int:
    """An estimate of what the largest step needs on a device beside weights and cache, from the model's widths."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    shards = vllm_config.parallel_config.tensor_parallel_size
    text = model.hf_text_config
    hidden = model.get_hidden_size()
    wide = (
        max(getattr(text, name, None) or 0 for name in ("intermediate_size", "ffn_dim", "n_inner"))
        or 4 * hidden
    )
    per_token = getattr(text, "num_experts_per_tok", None) or 1
    heads = text.num_attention_heads + 2 * model.get_total_num_kv_heads()
    widths = 4 * hidden + (2 * wide * per_token + heads * model.get_head_size()) // shards
    itemsize = model.dtype.itemsize
    activations = scheduler.max_num_batched_tokens * widths * itemsize * _LIVE_ACTIVATIONS
    logits = scheduler.max_num_seqs * model.get_vocab_size() * 4 * _LIVE_LOGITS // shards
    return activations + logits
