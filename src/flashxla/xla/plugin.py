"""PyTorch/XLA's device plugin for NVIDIA GPUs: the entry point `torch_xla.plugins`, chosen by PJRT_DEVICE=CUDA."""

from __future__ import annotations

import os
from typing import Any

from torch_xla.experimental import plugins

from flashxla.xla import gpu, pjrt_adapter
from flashxla.xla.gpu import Place

# Processes share out the tuning of a program's kernels and wait for each other's results, forever if their programs
# differ, as those of xm.all_gather do: each holds its process's rank.
_FLAGS_OF_A_GROUP = {"--xla_gpu_shard_autotuning": "false"}


class CudaPlugin(plugins.DevicePlugin):
    """JAX's CUDA plugin, behind the adapter that makes it fit."""

    def library_path(self) -> str:
        """The adapter, which is the plugin that torch_xla loads. Raises PluginError if there is none to adapt."""
        if self.requires_xla_coordinator():
            flags = os.environ.get("XLA_FLAGS", "")
            ours = [f"{name}={value}" for name, value in _FLAGS_OF_A_GROUP.items() if name not in flags]
            os.environ["XLA_FLAGS"] = " ".join([flags, *ours]).strip()
        return str(pjrt_adapter.load().path)

    def client_create_options(self) -> dict[str, Any]:
        """The options in the environment; in a group of processes each takes the GPU of its local rank."""
        options = gpu.client_options(os.environ)
        place = Place.of(os.environ)
        if place.size > 1:
            options.update(node_id=place.rank, num_nodes=place.size)
        return options

    def requires_xla_coordinator(self) -> bool:
        """Several processes find each other through rank 0's coordinator."""
        return Place.of(os.environ).size > 1

    def physical_chip_count(self) -> int:
        """How many processes torch_xla.launch starts: one a GPU. Raises RuntimeError if there is none."""
        count = gpu.count(os.environ)
        if count == 0:
            raise RuntimeError(
                "torch_xla.launch: got a machine on which CUDA sees no GPU; accepted: at least one"
            )
        return count

    def configure_single_process(self) -> None:
        """One process on one GPU."""
        first = (gpu.visible_devices(os.environ) or [0])[0]
        gpu.use_gpu(visible_devices=[first])
