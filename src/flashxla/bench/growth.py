"""Growth: the time of one call of attention as one thing in it grows, beside what the machine's own rates allow.

On a GPU the call is a replay of a CUDA graph, so the time is the device's, with the plan and every launch.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import flashxla.torch as fx
from flashxla.bench import ceilings, timing
from flashxla.bench.runner import TOLERANCE
from flashxla.bench.topic import Options

PAGE = 16
COPY, MATMUL = "copy", "matmul"

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sequences of `queries` query tokens each, which see `keys` keys, their own among them.

    rows, columns: of the block table; those that no sequence needs are padding.
    """

    sequences: int
    queries: int
    keys: int
    rows: int = 0
    columns: int = 0


@dataclasses.dataclass(frozen=True)
class Series:
    """What grows: batches by size. sizes: by device, and those of --quick."""

    name: str
    sizes: Mapping[str, tuple[int, ...]]
    batch: Callable[[int], Batch]


def _powers(low: int, high: int, factor: int = 4) -> tuple[int, ...]:
    """low, low * factor, ... and high."""
    found = itertools.takewhile(lambda size: size < high, (low * factor**i for i in itertools.count()))
    return (*found, high)


_LENGTH = 256  # of the prompts of a batch of prompts

SERIES = (
    Series(
        "decode, sequences of 128 keys",
        {"cpu": _powers(1, 4096), "cuda": _powers(1, 4096), "quick": (1, 3)},
        lambda size: Batch(size, 1, 128),
    ),
    Series(
        "decode, 16 sequences of 2048 keys, in so many rows",
        {"cpu": _powers(16, 4096), "cuda": _powers(16, 4096), "quick": (16, 20)},
        lambda size: Batch(16, 1, 2048, rows=size),
    ),
    Series(
        "decode, 16 sequences of 2048 keys, columns of the table",
        {"cpu": _powers(128, 2**17), "cuda": _powers(128, 2**17), "quick": (128, 150)},
        lambda size: Batch(16, 1, 2048, columns=size),
    ),
    Series(
        "decode, 1 sequence, keys",
        {"cpu": _powers(1024, 2**18), "cuda": _powers(1024, 2**20), "quick": (32, 64)},
        lambda size: Batch(1, 1, size),
    ),
    Series(
        f"prompts of {_LENGTH} tokens, tokens",
        {"cpu": _powers(_LENGTH, 2**14), "cuda": _powers(_LENGTH, 2**17), "quick": (_LENGTH, 2 * _LENGTH)},
        lambda size: Batch(size // _LENGTH, _LENGTH, _LENGTH),
    ),
    Series(
        "1 prompt, tokens",
        {"cpu": _powers(256, 2**13), "cuda": _powers(512, 2**17), "quick": (32, 64)},
        lambda size: Batch(1, size, size),
    ),
)
_HEADS = {"cpu": (8, 8), "cuda": (32, 8), "quick": (4, 2)}
_DIM = {"cpu": 128, "cuda": 128, "quick": 32}


def run(options: Options) -> list[Row]:
    """One row for each (series, size): seconds, and limit_seconds, what the rates of the same run allow."""
    torch.set_num_threads(options.threads)
    kind = "quick" if options.quick else options.device
    dtype = getattr(torch, options.dtypes[0])
    min_seconds = 0.001 if options.quick else timing.MIN_SAMPLE_SECONDS
    limits = {COPY: ceilings.copy(dtype, options), MATMUL: ceilings.matmul(dtype, options)}
    rows: list[Row] = []
    for series in SERIES:
        for size in series.sizes[kind]:
            print(f"growth: {series.name}: {size}", file=sys.stderr)
            torch.manual_seed(0)
            problem = Problem(
                series.batch(size), _HEADS[kind], _DIM[kind], dtype, torch.device(options.device)
            )
            problem.check()
            calls = {"ours": problem.timed(), **{name: limit.call for name, limit in limits.items()}}
            samples = timing.interleave(calls, options.rounds, min_seconds)
            rates = {name: limit.work / statistics.median(samples[name]) for name, limit in limits.items()}
            rows.append(
                {
                    "series": series.name,
                    "size": size,
                    "dtype": options.dtypes[0],
                    "seconds": statistics.median(samples["ours"]),
                    "fastest_seconds": min(samples["ours"]),
                    "samples": len(samples["ours"]),
                    "limit_seconds": max(problem.bytes / rates[COPY], problem.flops / rates[MATMUL]),
                    "limit": COPY if problem.bytes / rates[COPY] > problem.flops / rates[MATMUL] else MATMUL,
                }
            )
    return rows


class Problem:
    """A batch's tensors: pages in shuffled order, and a table whose padding names no page."""

    def __init__(
        self, batch: Batch, heads: tuple[int, int], dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._batch, self._dtype = batch, dtype
        pages = -(-batch.keys // PAGE)
        number = functools.partial(torch.randn, dtype=dtype, device=device)
        self._q = number(batch.sequences * batch.queries, heads[0], dim)
        self._k, self._v = (number(batch.sequences * pages, PAGE, heads[1], dim) for _ in range(2))
        rows = max(batch.rows, batch.sequences)
        table = torch.full((rows, max(batch.columns, pages)), -1, dtype=torch.int32)
        table[: batch.sequences, :pages] = torch.randperm(batch.sequences * pages).view(-1, pages)
        lens = torch.zeros(rows, dtype=torch.int32)
        lens[: batch.sequences] = batch.keys
        offsets = torch.full((rows + 1,), len(self._q), dtype=torch.int32)
        offsets[: batch.sequences + 1] = torch.arange(batch.sequences + 1) * batch.queries
        self._table, self._lens, self._offsets = (x.to(device) for x in (table, lens, offsets))
        self._num_seqs = torch.tensor([batch.sequences], dtype=torch.int32, device=device)

    @property
    def bytes(self) -> float:
        """The keys and values, each read once; queries and outputs."""
        batch = self._batch
        read = 2 * batch.sequences * batch.keys * self._k[0, 0].numel() + 2 * self._q.numel()
        return float(read * self._dtype.itemsize)

    @property
    def flops(self) -> float:
        """Two products, over the keys that causality leaves."""
        batch = self._batch
        pairs = batch.queries * batch.keys - batch.queries * (batch.queries - 1) // 2
        return 4.0 * batch.sequences * pairs * self._q[0].numel()

    def call(self) -> torch.Tensor:
        """Our operation."""
        out = fx.flash_attn_varlen_func(
            self._q,
            self._k,
            self._v,
            self._batch.queries,
            self._offsets,
            self._batch.keys,
            seqused_k=self._lens,
            block_table=self._table,
            num_seqs=self._num_seqs,
            causal=True,
        )
        assert isinstance(out, torch.Tensor)
        return out

    def timed(self) -> Callable[[], object]:
        """What is timed: on a GPU without the host's part."""
        if not self._q.is_cuda:
            return self.call
        side = torch.cuda.Stream()
        with torch.cuda.stream(
            side
        ):  # as torch.cuda.graph asks: what is loaded at the first call is loaded here
            self.call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._out = self.call()
        return graph.replay

    def check(self) -> None:
        """Raises RuntimeError if the last tokens of the last sequence are not as PyTorch has them."""
        batch = self._batch
        last = min(batch.queries, 64)  # PyTorch would make all scores of a long prompt
        queries = self._q[-last:].transpose(0, 1)[None]
        pages = self._table[batch.sequences - 1, : -(-batch.keys // PAGE)].long()
        keys, values = (
            x[pages].flatten(0, 1)[: batch.keys].transpose(0, 1)[None] for x in (self._k, self._v)
        )
        places = torch.arange(batch.keys, device=queries.device)
        mask = places <= places[batch.keys - last :, None]
        expected = sdpa(queries, keys, values, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)
        atol, rtol = TOLERANCE[str(self._dtype).removeprefix("torch.")]
        try:
            torch.testing.assert_close(self.call()[-last:], expected, atol=atol, rtol=rtol)
        except AssertionError as error:
            raise RuntimeError(f"growth: {batch}: PyTorch and flashxla disagree: {error}") from None
