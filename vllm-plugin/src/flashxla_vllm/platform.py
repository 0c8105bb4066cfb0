"""vLLM's platform: tpu-inference's, for JAX devices that are no TPUs."""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING, Any

from flashxla_vllm import overrides, processes, refusals, versions

versions.check()
overrides.on_platform()
# vLLM's imports have made a million objects that stay, and make as many more: Python need not look through them each
# time that it collects garbage. vLLM does the same when an engine has started.
gc.freeze()

from tpu_inference.platforms.tpu_platform import TpuPlatform  # noqa: E402

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class XlaPlatform(TpuPlatform):
    """CPU and NVIDIA GPUs through JAX."""

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """A constant: JAX must not start in the parent of a process that is forked."""
        return "xla"

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        """vLLM calls this before it makes a configuration, and when it makes a parser of options."""
        super().pre_register_and_update(parser)
        if parser is None:
            overrides.on_config()

    @classmethod
    def verify_quantization(cls, quant: str) -> None:
        """Nothing here: refusals.check knows more."""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Refuse what does not work, then set vLLM up for JAX."""
        from vllm.config import CompilationMode

        from flashxla_vllm import memory

        refusals.check(vllm_config)
        super().check_and_update_config(vllm_config)
        parallel = vllm_config.parallel_config
        parallel.worker_cls = "flashxla_vllm.worker.XlaWorker"
        if parallel.nnodes_within_dp > 1:
            parallel.distributed_executor_backend = "flashxla_vllm.machines.FirstMachine"
            if parallel.node_rank_within_dp > 0:
                overrides.on_headless_machine()
        # JAX compiles the step; torch.compile under torchax fails with torch >= 2.11.
        vllm_config.compilation_config.mode = CompilationMode.NONE
        memory.claim_device_memory(vllm_config)
        model = vllm_config.model_config
        if model is not None:
            # tpu-inference takes the number as it is: -1, which means all, and one that is larger fail in its top-k.
            vocabulary = model.get_vocab_size()
            if not 0 <= model.max_logprobs <= vocabulary:
                model.max_logprobs = vocabulary

    @classmethod
    def _resolve_multiprocess_dp(cls, vllm_config: VllmConfig) -> None:
        """Data parallel in an engine process for each rank, where vLLM starts those; else in one process.

        tpu-inference sees only a server that starts all ranks itself. TPU_MULTIPROCESS_DP, if set, decides.
        """
        if processes.data_parallel_has_its_own(vllm_config.parallel_config):
            os.environ.setdefault("TPU_MULTIPROCESS_DP", "1")  # the API servers' processes inherit it

    @classmethod
    def get_attn_backend_cls(cls, selected_backend: Any, attn_selector_config: Any, **kwargs: Any) -> str:
        """flashxla's layer, whatever was selected."""
        if attn_selector_config.use_mla:
            raise NotImplementedError("flashxla-vllm: multi-head latent attention (MLA) is not supported")
        return "flashxla_vllm.layer.FlashXlaLayerBackend"

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        """Refuse the sampling parameters that would be silently ignored. tpu-inference's own check refuses seeds."""
        refusals.check_request(params)
