"""PyTorch's collectives between processes that run TorchTPU, each on a device of its own (torchrun).

TorchTPU's own are for TPUs: they need the topology of a slice. Here Gloo computes them on copies in the host's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo
from torch.futures import Future

from flashxla.xla.torch_tpu import DEVICE

BACKEND = "flashxla_gloo"
_c10d: Any = torch._C._distributed_c10d


def register() -> None:
    """Make BACKEND known to torch.distributed."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _make, devices=["cpu", DEVICE])


def _collective(name: str, *, writes: bool = True) -> Callable[..., Any]:
    """A collective of Gloo's, the first argument of which holds the tensors that it writes."""

    def method(self: HostGroup, written: Any, *args: Any, **kwargs: Any) -> Any:
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def to_host(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                copies.append((x, x.cpu()))
                return copies[-1][1]
            return [to_host(item) for item in x] if isinstance(x, list | tuple) else x

        first = to_host(written)
        outputs = list(copies)
        getattr(self.host, name)(first, *map(to_host, args), **kwargs).wait()
        if writes:
            with torch.no_grad():
                for tensor, copy in outputs:
                    if tensor is not copy:
                        tensor.copy_(copy)
        done: Future[Any] = Future()
        done.set_result(written)
        return _c10d._create_work_from_future(done)

    return method


class HostGroup(dist.ProcessGroup):
    """A process group for tensors of TorchTPU and of the CPU. A collective has ended when its call returns."""

    def __init__(self, host: Any) -> None:
        super().__init__(host.rank(), host.size())  # type: ignore[call-arg]
        self.host = host

    def getBackendName(self) -> str:
        """What torch.distributed calls it."""
        return BACKEND

    def barrier(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for all processes."""
        return self.host.barrier(*args, **kwargs)

    broadcast = _collective("broadcast")
    allreduce = _collective("allreduce")
    allreduce_coalesced = _collective("allreduce_coalesced")
    reduce = _collective("reduce")
    allgather = _collective("allgather")
    _allgather_base = _collective("_allgather_base")
    gather = _collective("gather")
    scatter = _collective("scatter")
    reduce_scatter = _collective("reduce_scatter")
    _reduce_scatter_base = _collective("_reduce_scatter_base")
    alltoall = _collective("alltoall")
    alltoall_base = _collective("alltoall_base")
    # PyTorch 2.15's names of three of them.
    all_gather_single = _collective("all_gather_single")
    reduce_scatter_single = _collective("reduce_scatter_single")
    all_to_all_single = _collective("all_to_all_single")
    send = _collective("send", writes=False)
    recv = _collective("recv")


def _make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> HostGroup:
    return HostGroup(ProcessGroupGloo(dist.PrefixStore(BACKEND, store), rank, size, timeout))
