"""An engine in this process, and what tests ask of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch_xla

from tests.vllm import engine as current


class Engine(current.Engine):
    """The engine of tests/vllm, whose caches are PyTorch/XLA tensors."""

    def __init__(self, path: Path, **options: Any) -> None:
        _import_model(path)
        super().__init__(path, **options)

    @property
    def caches(self) -> list[torch.Tensor]:
        """The layers' caches."""
        return self.runner.kv_caches

    def cache_pointers(self) -> list[int]:
        """The addresses of the layers' caches."""
        torch_xla.sync(wait=True)
        return [torch_xla._XLAC._unsafe_buffer_pointer(cache) for cache in self.caches]

    def forget_programs(self) -> None:
        """Drop what was compiled for it."""
        torch._dynamo.reset()


def _import_model(path: Path) -> None:
    """Give vLLM the model's class: it would start a process for each one, to look at it."""
    from vllm import ModelRegistry

    (architecture,) = json.loads((path / "config.json").read_text())["architectures"]
    ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())


@contextlib.contextmanager
def engine(path: Path, **options: Any) -> Iterator[Engine]:
    """An engine; its memory is given back behind the block."""
    with contextlib.closing(Engine(path, **options)) as running:
        yield running
