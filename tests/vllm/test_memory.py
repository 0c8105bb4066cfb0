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
    assert 3.35 * GIBI < reserve < 7 * GIBI


@pytest.mark.parametrize(
    ("free", "held"),
    [
        (100 << 20, None),  # too little to hold anything
        ((256 << 20) + 4096, 4096),  # what is left beside the programs' own
        (80 << 30, "reserve"),  # never more than the estimate: XLA's autotuning needs the rest
    ],
)
def test_room_for_a_step_is_held_while_programs_are_compiled(monkeypatch, free, held):
    device = types.SimpleNamespace(memory_stats=lambda: {"largest_free_block_bytes": free})
    monkeypatch.setattr(memory.jnp, "zeros", lambda *args, **kwargs: (*args, kwargs["device"]))
    monkeypatch.setattr(memory.jax, "block_until_ready", lambda pieces: pieces)
    size = memory.activation_bytes(a_config()) if held == "reserve" else held
    expected = [] if size is None else [(size, jax.numpy.uint8, device)] * 2
    assert memory.hold_room_for_step(a_config(), [device, device]) == expected


def test_a_cpu_needs_no_room_held():
    assert memory.hold_room_for_step(a_config(), jax.local_devices()) == []
    memory.check_room_for_step(1 << 60, jax.local_devices())


def test_a_step_that_does_not_fit_is_refused_before_it_runs():
    device = types.SimpleNamespace(memory_stats=lambda: {"largest_free_block_bytes": 4 << 20})
    memory.check_room_for_step(4 << 20, [device])
    with pytest.raises(ValueError, match=r"needs 5 MiB, and 4 MiB are free.*--max-num-batched-tokens"):
        memory.check_room_for_step(5 << 20, [device])


def test_programs_wait_for_the_cache_without_arrays(monkeypatch, checkpoint):
    """Where the smallest lay in the cache's place, the last layer's cache would not fit."""
    from flashxla_vllm import waiting
    from tpu_inference.runner.tpu_runner import TPUModelRunner

    lasting, left = [], []
    find, bring_back = waiting.lasting_arrays, TPUModelRunner.reinitialize_kv_cache

    def recorded():
        lasting.append(find())
        return lasting[-1]

    def watched(self):
        left.append([x.shape for x in jax.live_arrays() if id(x) not in lasting[0] and not x.is_deleted()])
        bring_back(self)

    monkeypatch.setattr(waiting, "lasting_arrays", recorded)
    monkeypatch.setattr(TPUModelRunner, "reinitialize_kv_cache", watched)
    with engine(checkpoint("llama")):
        assert left == [[]]


@pytest.mark.parametrize("family", FAMILIES)
def test_activations_of_each_family(family, checkpoint):
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        str(checkpoint(family)), dtype="float32", max_model_len=256, max_num_batched_tokens=64
    )
    config = arguments.create_engine_config()
    logits = config.scheduler_config.max_num_seqs * 512 * 4 * 16
    assert logits < memory.activation_bytes(config) < logits + (6 << 20)


def test_budget_of_gpus(monkeypatch):
    """JAX may allocate 0.95 of 140 GiB, the engine owns 0.9 of them, 15 GiB are weights."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    gpus = [a_gpu(133 * GIBI, 15 * GIBI)] * 2
    config = a_config()
    owned = int(133 * GIBI / 0.95 * 0.9)
    expected = 2 * (owned - 15 * GIBI - memory.activation_bytes(config))
    assert expected - 2 * owned // 256 <= memory.available_for_cache(config, gpus) <= expected


def test_starts_that_use_a_little_more_have_the_same_cache(monkeypatch):
    """Its size is part of the compiled programs, which the next start must find."""
    monkeypatch.setattr(memory, "_settle", lambda: None)  # 400 collections of garbage took minutes
    config = a_config()
    sizes = {
        memory.available_for_cache(config, [a_gpu(100 * GIBI, used << 20)]) for used in range(15000, 15400)
    }
    assert len(sizes) <= 2
    assert memory.available_for_cache(config, [a_gpu(100 * GIBI, 30 * GIBI)]) not in sizes


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


def test_cpu_never_takes_more_than_is_free(monkeypatch):
    now = psutil.virtual_memory()._replace(available=GIBI)  # what is free and in use changes all the time
    monkeypatch.setattr(psutil, "virtual_memory", lambda: now)
    monkeypatch.setattr(memory, "used_bytes", lambda device: GIBI)
    owned = memory.owned_bytes(jax.local_devices()[0], 1.0)
    assert owned == GIBI + GIBI // len(jax.local_devices())


def test_utilization_sizes_the_cache(checkpoint):
    with engine(checkpoint("llama"), kv_cache_memory_bytes=None, gpu_memory_utilization=0.2) as running:
        size = sum(cache.nbytes for cache in running.runner.kv_caches)
        device = jax.local_devices()[0]
        assert size < memory.owned_bytes(device, 0.2)
        assert size > 16 << 20


def test_stated_bytes_size_the_cache(checkpoint):
    with engine(checkpoint("llama"), kv_cache_memory_bytes=20 << 20) as running:
        assert 19 << 20 < sum(cache.nbytes for cache in running.runner.kv_caches) <= 20 << 20
