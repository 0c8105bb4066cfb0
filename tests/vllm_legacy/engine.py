"""An engine in this process, and what tests ask of it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch_xla

from tests.vllm import engine as current


class Engine(current.Engine):
    """The engine of tests/vllm, whose caches are PyTorch/XLA tensors."""

    @property
    def caches(self) -> list[torch.Tensor]:
        """The layers' caches."""
        return self.runner.kv_caches

    def cache_pointers(self) -> list[int]:
        """The addresses of the layers' caches."""
        torch_xla.sync(wait=True)
        return [torch_xla._XLAC._unsafe_buffer_pointer(cache) for cache in self.caches]


@contextlib.contextmanager
def engine(path: Path, **options: Any) -> Iterator[Engine]:
    """An engine; its memory is given back behind the block."""
    running = Engine(path, **options)
    try:
        yield running
    finally:
        running.llm.llm_engine.engine_core.shutdown()
        del running.llm
        torch._dynamo.reset()
        gc.collect()
