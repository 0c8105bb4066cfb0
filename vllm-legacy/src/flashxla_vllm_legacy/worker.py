"""The worker: vLLM's for PyTorch/XLA, on any XLA device."""

from __future__ import annotations

from typing import Any

import torch
import torch_xla
import torch_xla.backends
import torch_xla.core.xla_model as xm

from flashxla_vllm_legacy import device, memory, overrides

overrides.apply()

from vllm.model_executor import set_random_seed  # noqa: E402
from vllm.v1.worker.tpu_worker import TPUWorker  # noqa: E402

from flashxla_vllm_legacy.runner import XlaModelRunner  # noqa: E402


class XlaWorker(TPUWorker):
    """Starts the device that PJRT_DEVICE names, and asks memory.py how large the cache may be."""

    def __init__(self, *args: Any, shared_worker_lock: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def init_device(self) -> None:
        """Instead of the parent's, which sets PJRT_DEVICE=TPU."""
        torch.set_grad_enabled(False)
        torch.set_default_dtype(self.model_config.dtype)
        self._init_tpu_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank
        )
        if self.model_config.dtype == torch.float32 and device.is_gpu():
            # As PyTorch computes float32; XLA's default there is TF32.
            torch_xla.backends.set_mat_mul_precision("highest")
        self.device = self.device_config.device = torch_xla.device()
        set_random_seed(self.model_config.seed)
        xm.set_rng_state(self.model_config.seed, str(self.device))
        # Graphs of a function: one for each padded size.
        torch._dynamo.config.recompile_limit = 128
        # Guards on symbolic shapes would be C++ programs, compiled at start. vLLM drops the guards all the same.
        torch._dynamo.config.enable_cpp_symbolic_shape_guards = False
        self.model_runner = XlaModelRunner(self.vllm_config, self.device)

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache."""
        return memory.available_for_cache(self.vllm_config, self.device)
