"""The worker: tpu-inference's, on any JAX device."""

from __future__ import annotations

import gc
from typing import Any

from flashxla_vllm import overrides

overrides.on_worker()

import jax  # noqa: E402
from tpu_inference.worker.tpu_worker import TPUWorker  # noqa: E402

from flashxla_vllm import memory, processes, sampling  # noqa: E402


class XlaWorker(TPUWorker):
    """tpu-inference's worker, which asks memory.py how large the cache may be, and processes.py for its devices."""

    def init_device(self, *args: Any, **kwargs: Any) -> None:
        """Start JAX on this process's devices."""
        processes.choose_devices(self.vllm_config)
        devices = processes.devices(self.vllm_config)
        if processes.several():
            self.devices = devices  # upstream would take the first ones, which are all of the first machine
        with processes.torch_alone(self.parallel_config):
            super().init_device(*args, **kwargs)
        if processes.several():
            overrides.on_several_machines()

    def _setup_dp_chip_isolation(self) -> None:
        """Upstream's pins the process to TPU chips; its devices are chosen above."""

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache on all devices of this worker."""
        sampling.batch_of(self.model_runner)  # allocates
        own = processes.own_devices(self.devices)
        bytes_each = memory.available_for_cache(self.vllm_config, own) // len(own)
        return processes.smallest(bytes_each) * len(self.devices)

    def compile_or_warm_up_model(self) -> Any:
        """Compile while the cache's memory is free: XLA tries variants of products on operands that it allocates.

        The cache comes back before the programs run for the first time.
        """
        runner = self.model_runner
        manager = runner.compilation_manager
        flush = manager._flush_compilations

        def flush_with_cache() -> None:
            # flush raises what others raised
            done = [f.result() for f in manager._compile_futures if f.exception() is None]
            if any(isinstance(cache, jax.ShapeDtypeStruct) for cache in runner.kv_caches):
                largest = max((program.memory_analysis().temp_size_in_bytes for program in done), default=0)
                with memory.room_for_step(largest, processes.own_devices(self.devices)):
                    runner.kv_caches.clear()
                    runner.layer_name_to_kvcache_index.clear()
                    runner.reinitialize_kv_cache()
            flush()

        if manager._compile_executor is not None:
            for i, cache in enumerate(runner.kv_caches):
                runner.kv_caches[i] = jax.ShapeDtypeStruct(cache.shape, cache.dtype, sharding=cache.sharding)
                cache.delete()
            manager._flush_compilations = flush_with_cache
            if not runner.is_pooling_model:  # upstream compiles these after the first flush
                manager._precompile_compute_logits()
                manager._precompile_compute_logits = lambda: None
        gc.disable()  # tracing makes millions of objects, most of which stay
        try:
            return super().compile_or_warm_up_model()
        finally:
            gc.enable()
