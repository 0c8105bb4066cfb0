"""vLLM's platform: XLA devices that PyTorch/XLA drives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flashxla_vllm_legacy import versions

versions.check()

from vllm.platforms.interface import Platform, PlatformEnum  # noqa: E402

if TYPE_CHECKING:
    from vllm.config import VllmConfig


_BLOCK_SIZE: Any = 16


class XlaPlatform(Platform):
    """CPU and NVIDIA GPUs through PyTorch/XLA."""

    _enum = PlatformEnum.OOT
    device_name = "xla"
    device_type = "xla"
    dispatch_key = "XLA"
    device_control_env_var = "CUDA_VISIBLE_DEVICES"
    simple_compile_backend = "openxla"
    dist_backend = "gloo"

    @classmethod
    def import_kernels(cls) -> None:
        """None: vLLM is built without kernels."""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Refuse what does not work, then set vLLM up for PyTorch/XLA."""
        from vllm.config import CompilationMode, CUDAGraphMode

        from flashxla_vllm_legacy import device, refusals

        refusals.check(vllm_config)
        vllm_config.parallel_config.worker_cls = "flashxla_vllm_legacy.worker.XlaWorker"
        if vllm_config.cache_config.block_size is None:
            vllm_config.cache_config.block_size = _BLOCK_SIZE
        # One trace by dynamo serves all sizes; XLA compiles a program for each.
        compilation = vllm_config.compilation_config
        compilation.mode = CompilationMode.DYNAMO_TRACE_ONCE
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        compilation.backend = "openxla"
        device.choose(vllm_config)

    @classmethod
    def get_attn_backend_cls(cls, selected_backend: Any, attn_selector_config: Any) -> str:
        """flashxla's, whatever was selected."""
        return "flashxla_vllm_legacy.attention.FlashXlaBackend"

    @classmethod
    def validate_request(cls, prompt: Any, params: Any, processed_inputs: Any) -> None:
        """Refuse the sampling parameters that the runner would silently ignore."""
        from flashxla_vllm_legacy import refusals

        refusals.check_request(params)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """A constant: PyTorch/XLA must not start in the parent of a process that is forked."""
        return "xla"

    @classmethod
    def inference_mode(cls) -> Any:
        """PyTorch/XLA knows no inference tensors."""
        return torch.no_grad()

    @classmethod
    def use_sync_weight_loader(cls) -> bool:
        """Each weight is computed when it is loaded, so that loading is not one huge program."""
        return True

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """Pinned memory is torch.cuda's."""
        return False
