"""How large the cache may be: on a CPU, and on a GPU as far as arithmetic goes."""

import os
import types

import psutil
import pytest
import torch
from flashxla_vllm_legacy import device, memory

from flashxla.machine import machine_bytes
from tests.vllm_legacy.engine import engine

GIBI = 1 << 30
FRACTION = "XLA_CLIENT_MEM_FRACTION"


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 140 GiB, of which XLA may allocate 0.95, with 15 GiB of weights."""
    monkeypatch.setenv("PJRT_DEVICE", "CUDA")
    monkeypatch.setenv(FRACTION, "0.95")
    info = {"bytes_limit": 133 * GIBI, "bytes_used": 15 * GIBI, "peak_bytes_used": 20 * GIBI}
    monkeypatch.setattr(memory.xm, "get_memory_info", lambda device: info)
    monkeypatch.setattr(memory.xm, "xla_real_devices", lambda devices: ["GPU:0"])


def a_config(utilization=0.9, stated=None):
    """Llama-3-8B's shape."""
    text = types.SimpleNamespace(intermediate_size=14336, num_attention_heads=32)
    return types.SimpleNamespace(
        cache_config=types.SimpleNamespace(gpu_memory_utilization=utilization, kv_cache_memory_bytes=stated),
        scheduler_config=types.SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=256),
        model_config=types.SimpleNamespace(
            hf_text_config=text,
            dtype=torch.bfloat16,
            get_hidden_size=lambda: 4096,
            get_total_num_kv_heads=lambda: 8,
            get_head_size=lambda: 128,
            get_vocab_size=lambda: 128256,
        ),
    )


def test_budget_of_a_gpu(gpu):
    config = a_config()
    expected = int(133 * GIBI / 0.95 * 0.9) - 15 * GIBI - memory.activation_bytes(config)
    assert memory.available_for_cache(config, torch.device("xla:0")) == pytest.approx(expected, abs=4)
    assert 3.35 * GIBI < memory.activation_bytes(config) < 6 * GIBI
    assert memory.available_for_cache(a_config(stated=5 * GIBI), torch.device("xla:0")) == 5 * GIBI


def test_nothing_left_is_an_error(gpu):
    with pytest.raises(ValueError, match="--gpu-memory-utilization"):
        memory.available_for_cache(a_config(0.1), torch.device("xla:0"))


def test_xla_allocates_what_the_engine_owns(monkeypatch):
    """use_gpu's arguments; it needs a plugin for GPUs."""
    asked = []
    monkeypatch.setattr(device.gpu, "use_gpu", lambda **options: asked.append(options))
    monkeypatch.setenv("PJRT_DEVICE", "CUDA")
    monkeypatch.delenv(FRACTION, raising=False)
    device.choose(a_config(0.8))
    assert asked == [{"memory_fraction": 0.8}]
    monkeypatch.setenv(FRACTION, "0.5")
    device.choose(a_config(0.8))
    assert len(asked) == 1  # the user's stays
    assert device.memory_fraction() == 0.5


@pytest.mark.parametrize(("gpus", "chosen"), [(0, "CPU"), (2, "CUDA")])
def test_device_by_default(gpus, chosen, monkeypatch):
    monkeypatch.delenv("PJRT_DEVICE")
    monkeypatch.setattr(device.gpu, "count", lambda environment: gpus)
    monkeypatch.setattr(device.gpu, "use_gpu", lambda **options: None)
    device.choose(a_config())
    assert os.environ["PJRT_DEVICE"] == chosen


@pytest.mark.skipif(device.is_gpu(), reason="of the CPU's memory")
def test_utilization_sizes_the_cache(checkpoint):
    options = {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.2, "enforce_eager": True}
    with engine(checkpoint("llama"), **options) as running:
        size = sum(cache.numel() * cache.itemsize for cache in running.caches)
        assert 16 << 20 < size < machine_bytes() * 0.2


@pytest.mark.skipif(device.is_gpu(), reason="of the CPU's memory")
def test_cpu_never_takes_more_than_is_free(monkeypatch):
    now = psutil.virtual_memory()._replace(available=GIBI)  # what is free changes all the time
    monkeypatch.setattr(psutil, "virtual_memory", lambda: now)
    owned, used = memory.owned_and_used_bytes(torch.device("xla:0"), 1.0)
    assert owned == used + GIBI


def test_stated_bytes_size_the_cache(checkpoint):
    with engine(checkpoint("llama"), kv_cache_memory_bytes=20 << 20, enforce_eager=True) as running:
        size = sum(cache.numel() * cache.itemsize for cache in running.caches)
        assert 19 << 20 < size <= 20 << 20
