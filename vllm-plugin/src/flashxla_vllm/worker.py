"""The worker: tpu-inference's, on any JAX device."""

from __future__ import annotations

import collections
import gc
import os
from typing import Any

from flashxla_vllm import overrides

gc.freeze()  # see platform.py
overrides.on_worker()

import jax  # noqa: E402
import jax.monitoring  # noqa: E402
import torch  # noqa: E402
from tpu_inference import envs  # noqa: E402
from tpu_inference.worker.tpu_worker import TPUWorker, ensure_kv_transfer_initialized  # noqa: E402
from vllm.logger import init_logger  # noqa: E402

from flashxla_vllm import layers, memory, processes, sampling, waiting  # noqa: E402

gc.freeze()
logger = init_logger("vllm.flashxla")

# JAX has not read these settings of overrides.py where it was imported before the platform.
for _setting, _type in (("MIN_COMPILE_TIME_SECS", float), ("MIN_ENTRY_SIZE_BYTES", int)):
    _value = os.environ[f"JAX_PERSISTENT_CACHE_{_setting}"]
    jax.config.update(f"jax_persistent_cache_{_setting.lower()}", _type(_value))

FOUND, COMPILED = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"
# What JAX says of the programs that it needs: found in VLLM_XLA_CACHE_PATH, or compiled.
programs: collections.Counter[str] = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: programs.update([event]))


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

    def load_model(self) -> None:
        """Load the model; its layers share their traces."""
        super().load_model()
        model = getattr(self.model_runner.model, "model", None)
        if isinstance(model, torch.nn.Module):  # vLLM's
            layers.share(model)

    def _setup_dp_chip_isolation(self) -> None:
        """Upstream's pins the process to TPU chips; its devices are chosen above."""

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache on all devices of this worker."""
        sampling.batch_of(self.model_runner)  # allocates
        own = processes.own_devices(self.devices)
        bytes_each = memory.available_for_cache(self.vllm_config, own) // len(own)
        return processes.smallest(bytes_each) * len(self.devices)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate the KV cache, before anything else splits the free memory; upstream runs the sampler first."""
        ensure_kv_transfer_initialized(self.vllm_config, kv_cache_config)
        self.model_runner.initialize_kv_cache(kv_cache_config, self.topology_order_id)

    def compile_or_warm_up_model(self) -> Any:
        """Compile while the cache's memory is free: XLA tries variants of products on operands that it allocates.

        The cache comes back before the programs run for the first time.
        """
        runner = self.model_runner
        manager = runner.compilation_manager
        if envs.SKIP_JAX_PRECOMPILE or runner.model_config.enforce_eager or manager._compile_executor is None:
            return super().compile_or_warm_up_model()
        devices = processes.own_devices(self.devices)

        def bring_cache_back(programs: list[Any]) -> None:
            runner.kv_caches.clear()
            runner.layer_name_to_kvcache_index.clear()
            runner.reinitialize_kv_cache()
            jax.block_until_ready(runner.kv_caches)
            for piece in room:
                piece.delete()
            largest = max((p.memory_analysis().temp_size_in_bytes for p in programs), default=0)
            memory.check_room_for_step(largest, devices)

        gc.disable()  # tracing makes millions of objects, most of which stay
        try:
            # Upstream compiles these later. Their arguments stay until they have run, so they go beside the cache.
            jax.block_until_ready(runner.kv_caches)
            manager._precompile_sampling()
            manager._precompile_gather_logprobs()
            room = memory.hold_room_for_step(self.vllm_config, devices)
            manager.lasting_arrays = waiting.lasting_arrays()
            for i, cache in enumerate(runner.kv_caches):
                runner.kv_caches[i] = jax.ShapeDtypeStruct(cache.shape, cache.dtype, sharding=cache.sharding)
                cache.delete()
            if not runner.is_pooling_model:
                manager._precompile_compute_logits()
            manager.before_warm_up = bring_cache_back
            return super().compile_or_warm_up_model()
        finally:
            gc.enable()
            logger.info("Programs: %d found compiled, %d compiled now", programs[FOUND], programs[COMPILED])
