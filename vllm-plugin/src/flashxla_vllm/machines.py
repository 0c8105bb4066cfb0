"""One model on several machines: `vllm serve --nnodes N --node-rank R --master-addr A`, the others with --headless.

Each machine has one process with all its devices. JAX joins them (jax.distributed), and every process runs the same
programs in the same order on one mesh. The scheduler and the API server are on the first machine, which sends each call
of its worker to the others before it makes the call itself.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import cloudpickle
import jax
from vllm.logger import init_logger
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.serial_utils import run_method

from flashxla_vllm.channel import Receiver, Sender

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig

logger = init_logger("vllm.flashxla")

_END = "end"
# How long a process waits for the others when it ends.
_SHUTDOWN_SECONDS = 10


class FirstMachine(UniProcExecutor):
    """The executor of the engine: a worker in its process, and what that does on the other machines too."""

    def _init_executor(self) -> None:
        parallel = self.parallel_config
        others = parallel.nnodes_within_dp - 1
        logger.info("Waiting for %d machine(s) at %s:%d", others, parallel.master_addr, parallel.master_port)
        self._others = Sender(parallel.master_addr, parallel.master_port, others)
        port = _free_port(parallel.master_addr)
        self._send(port)
        _join(parallel, port)
        super()._init_executor()

    def collective_rpc(  # type: ignore[override]
        self,
        method: str | Callable,
        timeout: float | None = None,
        args: tuple = (),
        kwargs: dict | None = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any | Future[Any]:
        """Call the worker's method on every machine; the result is this one's."""
        self._send((method, args, kwargs or {}))
        return super().collective_rpc(method, timeout, args, kwargs, non_block, single_value)

    def shutdown(self) -> None:
        """End this process's worker and the other machines'."""
        with contextlib.suppress(ConnectionError):
            self._send(_END)
        self._others.close()
        super().shutdown()
        jax.distributed.shutdown()

    def _send(self, message: Any) -> None:
        self._others.send(cloudpickle.dumps(message))


class OtherMachine(UniProcExecutor):
    """What `vllm serve --headless` runs on the other machines, in the place of vLLM's MultiprocExecutor."""

    def __init__(self, vllm_config: VllmConfig, monitor_workers: bool = False) -> None:
        super().__init__(vllm_config)

    def _init_executor(self) -> None:
        parallel = self.parallel_config
        self._first = Receiver(parallel.master_addr, parallel.master_port, parallel.node_rank_within_dp)
        _join(parallel, self._receive())
        super()._init_executor()

    def start_worker_monitor(self, inline: bool = False) -> None:
        """Do what the first machine does, until it ends."""
        while (call := self._receive()) != _END:
            method, args, kwargs = call
            run_method(self.driver_worker, method, args, kwargs)
        self.shutdown()
        jax.distributed.shutdown()

    def _receive(self) -> Any:
        message = self._first.receive()
        if message is None:
            logger.error("The first machine has gone")
            os._exit(1)  # at an orderly exit JAX would wait for it
        return cloudpickle.loads(message)


def _join(parallel: ParallelConfig, port: int) -> None:
    """Make the devices of all machines JAX's."""
    jax.distributed.initialize(
        f"{parallel.master_addr}:{port}",
        parallel.nnodes_within_dp,
        parallel.node_rank_within_dp,
        shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
    )


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]
