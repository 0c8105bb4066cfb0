"""The worker: tpu-inference's, on any JAX device."""

from __future__ import annotations

from flashxla_vllm import overrides

overrides.on_worker()

from tpu_inference.worker.tpu_worker import TPUWorker  # noqa: E402

from flashxla_vllm import memory, sampling  # noqa: E402


class XlaWorker(TPUWorker):
    """tpu-inference's worker, which asks memory.py how large the cache may be."""

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache on all devices of this worker."""
        sampling.batch_of(self.model_runner)  # allocates
        return memory.available_for_cache(self.vllm_config, self.devices)
