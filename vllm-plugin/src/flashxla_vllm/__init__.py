"""vLLM on XLA: tpu-inference's JAX runner on CPUs and NVIDIA GPUs, with flashxla's attention and KV cache."""


def platform() -> str:
    """What vLLM's entry point group `vllm.platform_plugins` asks for: the class of the platform."""
    return "flashxla_vllm.platform.XlaPlatform"
