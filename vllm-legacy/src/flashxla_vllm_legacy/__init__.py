"""vLLM 0.13.0 on PyTorch/XLA: its in-tree runner on CPUs and NVIDIA GPUs, with flashxla's attention and KV cache."""


def platform() -> str:
    """What vLLM's entry point group `vllm.platform_plugins` asks for: the class of the platform."""
    return "flashxla_vllm_legacy.platform.XlaPlatform"
