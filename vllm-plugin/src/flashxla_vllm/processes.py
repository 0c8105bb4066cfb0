"""Several engine processes: when data parallel ranks have their own, and which devices each one uses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

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


def devices(vllm_config: VllmConfig) -> list[Any]:
    """The devices of the model: as many of each process as of any other.

    Raises:
        ValueError: this process has too few.
    """
    import jax

    own, count = jax.local_devices(), jax.process_count()
    needed = vllm_config.sharding_config.total_devices // count
    if len(own) < needed:
        more = (
            f"XLA_FLAGS=--xla_force_host_platform_device_count={needed} makes so many of a CPU"
            if own[0].platform == "cpu"
            else "lower --tensor-parallel-size or --data-parallel-size"
        )
        raise ValueError(
            f"flashxla-vllm: this process needs {needed} devices and has {len(own)} ({own[0].device_kind}); {more}"
        )
    return [device for process in range(count) for device in jax.local_devices(process)[:needed]]


@contextlib.contextmanager
def torch_alone(parallel: ParallelConfig) -> Iterator[None]:
    """Keep torch.distributed to this process: with --nnodes vLLM would have it wait for a process for each device."""
    nodes, parallel.nnodes = parallel.nnodes, 1
    try:
        yield
    finally:
        parallel.nnodes = nodes


def several() -> bool:
    """Whether this process has only a part of the model."""
    import jax

    return jax.process_count() > 1


def own_devices(devices: Sequence[Any]) -> list[Any]:
    """Those of this process."""
    import jax

    return [device for device in devices if device.process_index == jax.process_index()]


def smallest(value: int) -> int:
    """The least of what the processes say, where several run one model; each of them must ask."""
    if not several():
        return value
    import numpy as np
    from jax.experimental import multihost_utils

    # In MiB: JAX's integers have 32 bits.
    said = multihost_utils.process_allgather(np.int32(value >> 20))
    return int(said.min()) << 20
