"""How large the cache may be, on a CPU and on GPUs, as far as arithmetic goes."""

import types

import jax
import psutil
import pytest
from flashxla_vllm import memory

from tests.vllm.checkpoints import FAMILIES
from tests.vllm.engine import engine

GIBI = 1 << 30


def a_gpu(limit, used):
    stats = {"bytes_limit": limit, "bytes_in_use": used}
    return types.SimpleNamespace(platform="gpu", memory_stats=lambda: stats)


def a_config(utilization=0.9, stated=None):
    """Llama-3-8B's shape."""
    import torch

    text = types.SimpleNamespace(intermediate_size=14336, num_attention_heads=32)
    return types.SimpleNamespace(
        cache_config=types.SimpleNamespace(gpu_memory_utilization=utilization, kv_cache_memory_bytes=stated),
        scheduler_config=types.SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=256),
        parallel_config=types.SimpleNamespace(tensor_parallel_size=1),
        model_config=types.SimpleNamespace(
            hf_text_config=text,
            dtype=torch.bfloat16,
            get_hidden_size=lambda: 4096,
            get_total_num_kv_heads=lambda: 8,
            get_head_size=lambda: 128,
            get_vocab_size=lambda: 128256,
        ),
    )


def test_activations_are_reserved():
    """A step of this shape was measured to need 3.35 GiB on an H200, in one piece, beside weights and cache."""
    reserve = memory.activation_bytes(a_config())
    assert 3.35 * GIBI < reserve < 6 * GIBI


def test_room_for_a_step_is_kept_while_the_cache_is_allocated():
    device = jax.local_devices()[0]
    before = len(jax.live_arrays())
    with memory.room_for_step(4 << 20, [device]):
        piece = max(jax.live_arrays(), key=lambda array: array.nbytes * (array.dtype == "uint8"))
        assert (piece.nbytes, piece.device) == (4 << 20, device)
    assert piece.is_deleted() and len(jax.live_arrays()) == before
    with (
        pytest.raises(ValueError, match=r"needs 4 MiB.*--max-num-batched-tokens"),
        memory.room_for_step(4 << 20, [device]),
    ):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
    assert len(jax.live_arrays()) == before


@pytest.mark.parametrize("family", FAMILIES)
def test_activations_of_each_family(family, checkpoint):
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        str(checkpoint(family)), dtype="float32", max_model_len=256, max_num_batched_tokens=64
    )
    config = arguments.create_engine_config()
    logits = config.scheduler_config.max_num_seqs * 512 * 4 * 4
    assert logits < memory.activation_bytes(config) < logits + (6 << 20)


def test_budget_of_gpus(monkeypatch):
    """JAX may allocate 0.95 of 140 GiB, the engine owns 0.9 of them, 15 GiB are weights."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    gpus = [a_gpu(133 * GIBI, 15 * GIBI)] * 2
    config = a_config()
    expected = 2 * (int(133 * GIBI / 0.95 * 0.9) - 15 * GIBI - memory.activation_bytes(config))
    assert memory.available_for_cache(config, gpus) == pytest.approx(expected, abs=4)


def test_jax_allocates_what_the_engine_owns(monkeypatch):
    import os

    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    memory.claim_device_memory(a_config(0.8))
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.8"
    assert memory.owned_bytes(a_gpu(112 * GIBI, 0), 0.8) == 112 * GIBI  # of a GPU with 140
    memory.claim_device_memory(a_config(0.5))
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.8"  # the user's stays
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")


def test_nothing_left_is_an_error(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    with pytest.raises(ValueError, match="--gpu-memory-utilization"):
        memory.available_for_cache(a_config(), [a_gpu(16 * GIBI, 15 * GIBI)])


def test_cpu_memory_is_split_among_virtual_devices():
    device = jax.local_devices()[0]
    assert memory.device_limit(device) * 2 == pytest.approx(memory.machine_bytes(), abs=2)
    assert memory.machine_bytes() <= psutil.virtual_memory().total


def test_cpu_never_takes_more_than_is_free(checkpoint):
    device = jax.local_devices()[0]
    assert memory.owned_bytes(device, 1.0) <= memory.used_bytes(device) + psutil.virtual_memory().available


def test_utilization_sizes_the_cache(checkpoint):
    with engine(checkpoint("llama"), kv_cache_memory_bytes=None, gpu_memory_utilization=0.2) as running:
        size = sum(cache.nbytes for cache in running.runner.kv_caches)
        device = jax.local_devices()[0]
        assert size < memory.owned_bytes(device, 0.2)
        assert size > 16 << 20


def test_stated_bytes_size_the_cache(checkpoint):
    with engine(checkpoint("llama"), kv_cache_memory_bytes=20 << 20) as running:
        assert 19 << 20 < sum(cache.nbytes for cache in running.runner.kv_caches) <= 20 << 20
