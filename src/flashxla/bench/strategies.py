"""Ways to update a paged KV cache from PyTorch/XLA, side by side: what each costs as the cache grows.

The four strategies that were in use before flashxla, and its aliased operation, as the code that a user would
write. All but the existing function run flashxla's custom call, so only the way in differs.
"""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

import flashxla.torch as fx
from flashxla.bench import machine
from flashxla.bench.topic import Options

MIB = 2**20
SIZES = (16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB, 2048 * MIB)  # of K and V together
QUICK_SIZES = (1 * MIB, 2 * MIB)
MODES = ("lazy", "openxla")

T = torch.Tensor
Caches = tuple[T, T]
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A way to write.

    write: (key, value, key_cache, value_cache, slot_mapping) -> None if the caches hold the new tokens now,
        else the new caches.
    allow_in_graph: torch.compile is told not to look into it.
    """

    name: str
    write: Callable[..., Caches | None]
    allow_in_graph: bool = False


def _direct(key: T, value: T, key_cache: T, value_cache: T, slots: T) -> None:
    """Put the custom call into XLA's graph without an operation of PyTorch's, then assign `.data`."""
    from flashxla import ops, torch_library
    from flashxla.xla import embed

    op = ops.RESHAPE_AND_CACHE_FLASH
    values = torch_library.values_of(op, (key, value, key_cache, value_cache, slots))
    _, (key_cache.data, value_cache.data) = embed.run(op, values)


def _existing(key: T, value: T, key_cache: T, value_cache: T, slots: T) -> None:
    """Reuse a function that knows nothing of XLA: PyTorch's own (vLLM's has CUDA tensors only)."""
    key_cache.flatten(0, 1).index_copy_(0, slots, key)
    value_cache.flatten(0, 1).index_copy_(0, slots, value)


def _tpu_style(key: T, value: T, key_cache: T, value_cache: T, slots: T) -> None:
    """A functional operation that returns new caches, then copy_, which XLA may or may not remove."""
    new = torch.ops.flashxla.reshape_and_cache_flash_functional(key, value, key_cache, value_cache, slots)
    key_cache.copy_(new[0])
    value_cache.copy_(new[1])


def _tpu_style_donor(key: T, value: T, key_cache: T, value_cache: T, slots: T) -> None:
    """The same, with the old caches offered to XLA as buffers for its results."""
    new = torch.ops.flashxla.reshape_and_cache_flash_functional(key, value, key_cache, value_cache, slots)
    torch.ops.xla.dynamo_set_buffer_donor_(key_cache, True)
    torch.ops.xla.dynamo_set_buffer_donor_(value_cache, True)
    key_cache.copy_(new[0])
    value_cache.copy_(new[1])


def _clone_and_return(key: T, value: T, key_cache: T, value_cache: T, slots: T) -> Caches:
    """Write into clones and return them."""
    clones = key_cache.clone(), value_cache.clone()
    return torch.ops.flashxla.reshape_and_cache_flash_functional(key, value, *clones, slots)


def _aliased(key: T, value: T, key_cache: T, value_cache: T, slots: T) -> None:
    """flashxla's operation."""
    fx.reshape_and_cache_flash(key, value, key_cache, value_cache, slots)


STRATEGIES = (
    Strategy("direct, .data", _direct, allow_in_graph=True),
    Strategy("existing function", _existing, allow_in_graph=True),
    Strategy("TPU style", _tpu_style),
    Strategy("TPU style + donor", _tpu_style_donor),
    Strategy("clone and return", _clone_and_return),
    Strategy("aliased op", _aliased),
)


def run(options: Options) -> list[Row]:
    """One row for each (strategy, mode, size): see `strategy_process.measure` for its fields.

    They run in another process. If a strategy crashes it, that is the strategy's result, and a new process
    goes on with the next one.
    """
    sizes = QUICK_SIZES if options.quick else _sizes_that_fit(SIZES)
    rows: list[Row] = []
    pool = None
    for index, mode in itertools.product(range(len(STRATEGIES)), MODES):
        name = STRATEGIES[index].name
        print(f"strategies: {name}, {mode}", file=sys.stderr)
        pool = pool or _new_process(options.threads)
        try:
            found = pool.submit(_measured, index, mode, sizes, options).result()
        except BrokenProcessPool:
            found = [{"works": False, "error": "the process crashed"}]
            pool = None
        rows += [{"strategy": name, "mode": mode, **row} for row in found]
    if pool:
        pool.shutdown()
    return rows


def _new_process(threads: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _set_environment, (threads,))


def _set_environment(threads: int) -> None:
    os.environ.update(PJRT_DEVICE="CPU", NPROC=str(threads))


def _measured(index: int, mode: str, sizes: tuple[int, ...], options: Options) -> list[Row]:
    """Runs in that process."""
    from flashxla.bench import strategy_process

    torch.manual_seed(0)
    dtype, seconds = getattr(torch, options.dtypes[0]), 0.1 if options.quick else 8.0
    try:
        return strategy_process.measure(STRATEGIES[index], mode, sizes, dtype, options.rounds, seconds)
    except Exception as error:  # whatever a strategy dies of is its result
        line = (str(error).strip().splitlines() or [""])[0]
        # Dynamo puts the call with all its arguments before the error that it got.
        return [{"works": False, "error": f"{type(error).__name__}: {line.rpartition(': got ')[2]}"}]


def _sizes_that_fit(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """All caches exist at once, and a write may need the largest one twice again."""
    available = machine.available_memory()
    fitting = tuple(size for i, size in enumerate(sizes) if sum(sizes[: i + 1]) + 3 * size < 0.9 * available)
    for size in sizes[len(fitting) :]:
        print(
            f"strategies: without {size // MIB} MiB: {available // MIB} MiB of memory are free",
            file=sys.stderr,
        )
    return fitting
