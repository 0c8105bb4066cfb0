"""The worker: tpu-inference's, on any JAX device."""

from __future__ import annotations

from typing import Any

from flashxla_vllm import overrides

overrides.on_worker()

from tpu_inference.worker.tpu_worker import TPUWorker  # noqa: E402

from flashxla_vllm import memory, processes  # noqa: E402


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
        own = processes.own_devices(self.devices)
        bytes_each = memory.available_for_cache(self.vllm_config, own) // len(own)
        return processes.smallest(bytes_each) * len(self.devices)
