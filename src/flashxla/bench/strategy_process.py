"""Measures a strategy in PyTorch/XLA, in a process of its own."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch_xla

from flashxla.bench import machine
from flashxla.bench.strategies import Row, Strategy

_HEADS, _DIM, _PAGE = 8, 128, 16
_TOKENS = 64
_FILL = 0.5  # what an untouched element of a cache holds
_MIN_ROUNDS = 3
_ROUND_SECONDS = 0.1  # of writes to one cache


class Writer:
    """A cache of `size` bytes (K and V) and the tokens that a strategy writes into it."""

    def __init__(self, write: Callable[..., Any], size: int, dtype: torch.dtype) -> None:
        self._write = write
        device = torch_xla.device()
        blocks = size // (2 * _PAGE * _HEADS * _DIM * dtype.itemsize)
        # XLA computes the fill, so every page of memory has been touched before the timing starts.
        self.caches = [
            torch.full((blocks, _PAGE, _HEADS, _DIM), _FILL, dtype=dtype, device=device) for _ in range(2)
        ]
        self._slots = torch.randperm(blocks * _PAGE)[:_TOKENS].to(device)
        self._tokens = [torch.randn(_TOKENS, _HEADS, _DIM).to(device, dtype) for _ in range(2)]
        torch_xla.sync(wait=True)

    def write(self) -> float:
        """Write once; returns the seconds until XLA has finished."""
        start = time.perf_counter()
        new = self._write(*self._tokens, *self.caches, self._slots)
        if new is not None:
            self.caches[:] = new
        del new
        torch_xla.sync(wait=True)
        return time.perf_counter() - start

    def pointers(self) -> list[int]:
        """The addresses of the caches' buffers."""
        return [torch_xla._XLAC._unsafe_buffer_pointer(cache) for cache in self.caches]

    def is_right(self, everything: bool) -> bool:
        """Whether the caches hold the tokens, and with `everything` nothing else that is new."""
        for cache, tokens in zip(self.caches, self._tokens, strict=True):
            rows = cache.flatten(0, 1)
            if not torch.equal(rows[self._slots].cpu(), tokens.cpu()):
                return False
            if everything:
                expected = torch.full(rows.shape, _FILL, dtype=rows.dtype)
                expected[self._slots.cpu()] = tokens.cpu()
                if not torch.equal(rows.cpu(), expected):
                    return False
        return True


def measure(
    strategy: Strategy, mode: str, sizes: Sequence[int], dtype: torch.dtype, rounds: int, seconds: float
) -> list[Row]:
    """A row for each size.

    seconds: the median time of one write, XLA's fixed costs of a step included. The sizes take turns, round
    by round, so that the machine's mood meets all of them; growth is this time by the smallest size's.
    extra_bytes: how far the process's resident memory rose above its level during one write, the caches
    themselves aside (the kernel's own high-water mark, reset before), or null where it cannot be reset.
    """
    torch._dynamo.reset()
    gc.collect()
    write = strategy.write
    if strategy.allow_in_graph:
        torch._dynamo.allow_in_graph(write)
    if mode == "openxla":
        # A function around it, since torch.compile always looks into the one that it is given.
        write = torch.compile(lambda *args: strategy.write(*args), backend="openxla", fullgraph=True)
    writers = [Writer(write, size, dtype) for size in sizes]
    rows: list[Row] = []
    for size, writer in zip(sizes, writers, strict=True):
        writer.write()
        right = writer.is_right(everything=size == sizes[0])
        before = writer.pointers()
        extra = _extra_bytes(writer)
        stays = writer.pointers() == before
        rows.append({"bytes": size, "works": right, "extra_bytes": extra, "pointer_stays": stays})
        if not right:
            rows[-1]["error"] = "the caches do not hold the tokens"
    times = _interleaved_times(writers, rounds, seconds)
    smallest = statistics.median(times[0])
    for row, samples in zip(rows, times, strict=True):
        row["seconds"] = statistics.median(samples)
        row["fastest_seconds"] = min(samples)
        row["samples"] = len(samples)
        row["growth"] = row["seconds"] / smallest
    return rows


def _extra_bytes(writer: Writer) -> int | None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that malloc keeps for later would hide the next allocation
    level = machine.reset_peak_memory()
    writer.write()
    return None if level is None else max(0, machine.peak_memory() - level)


def _interleaved_times(writers: list[Writer], rounds: int, seconds: float) -> list[list[float]]:
    """The seconds of each writer's writes."""
    times: list[list[float]] = [[] for _ in writers]
    start = time.perf_counter()
    for i in range(rounds):
        if i >= _MIN_ROUNDS and time.perf_counter() - start > seconds:
            break
        for writer, of_writer in zip(writers, times, strict=True):
            samples = [writer.write()]
            while sum(samples) < min(_ROUND_SECONDS, seconds / len(writers)):
                samples.append(writer.write())
            # The first of several short ones finds the processor's caches filled by another writer.
            of_writer += samples[1:] or samples
    return times
