"""Several engine processes: when data parallel ranks have their own, and which devices each one uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig


def data_parallel_has_its_own(parallel: ParallelConfig) -> bool:
    """Whether vLLM starts a process for each data parallel rank.

    `vllm serve` does; so does each machine's share of the ranks. A program's own engine (vllm.LLM) has all its ranks
    in one process, on one mesh of devices.
    """
    if parallel.data_parallel_size <= 1:
        return False
    return (
        getattr(parallel, "_api_process_rank", 0) == -1  # the process that starts the API servers
        or parallel.data_parallel_external_lb
        or parallel.data_parallel_hybrid_lb
        or parallel.data_parallel_size_local < parallel.data_parallel_size
    )


def choose_devices(vllm_config: VllmConfig) -> None:
    """Let JAX see only the GPUs that vLLM gave this process. Before JAX starts.

    JAX would allocate memory on every GPU that it sees. The numbers are those behind CUDA_VISIBLE_DEVICES. CPU devices
    are virtual, and each process has its own.
    """
    import jax

    assigned = vllm_config.parallel_config.assigned_physical_gpu_ids
    if assigned is not None:
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, assigned)))


def check_devices(vllm_config: VllmConfig) -> None:
    """Raise if this process has fewer devices than its share of the model needs.

    Raises:
        ValueError: says how many there are.
    """
    import jax

    needed = vllm_config.sharding_config.total_devices
    devices = jax.local_devices()
    if len(devices) < needed:
        more = (
            f"XLA_FLAGS=--xla_force_host_platform_device_count={needed} makes so many of a CPU"
            if devices[0].platform == "cpu"
            else "lower --tensor-parallel-size, or --data-parallel-size"
        )
        raise ValueError(
            f"flashxla-vllm: this process needs {needed} devices and has {len(devices)} ({devices[0].device_kind}); {more}"
        )
