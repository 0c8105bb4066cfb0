"""prefill.py TABLE...: how fast FlashAttention of prompts is, in CUDA graphs, beside a matrix product of PyTorch.

time: each kind of call with a long prompt, us and TFLOP/s. short: plain calls of several prompts. kernels: the time of
each kernel of these. ab: a line of plain calls, to be compared with another library's. one SEQUENCESxTOKENS[:KIND]:
some calls without a graph, for a profiler.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tables import print_chosen

import flashxla.torch as fx

BF16, F16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2


class Shape(NamedTuple):
    """Heads of queries and of keys, and their size; how many prompts of how many tokens."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    sequences: int = 1
    tokens: int = 8192

    def flops(self) -> float:
        """Of a causal call: half of the scores are seen."""
        return 2 * self.heads * self.head_dim * self.sequences * self.tokens**2

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads} d{self.head_dim} {self.sequences}x{self.tokens}"


SHAPES = (Shape(), Shape(head_dim=64), Shape(16, 4, 256))
SHORT = tuple(
    Shape(sequences=sequences, tokens=tokens)
    for sequences, tokens in ((64, 128), (16, 512), (4, 2048), (1, 512), (1, 1024), (1, 2048), (1, 4096))
)


class Kind(NamedTuple):
    """One row: its page size (None: dense), dtypes of queries and cache, options."""

    name: str
    page: int | None
    queries: torch.dtype = BF16
    cache: torch.dtype = BF16
    options: frozenset[str] = frozenset()


KINDS = (
    Kind("plain dense", None),
    Kind("plain", 16),
    Kind("alibi", 16, options=frozenset({"alibi"})),
    Kind("softcap", 16, options=frozenset({"softcap"})),
    *(Kind(f"page {size}", size) for size in (8, 4, 2, 1)),
    Kind("bf16/e4m3", 16, BF16, E4M3),
    Kind("bf16/e5m2", 16, BF16, E5M2),
    Kind("f16/e4m3", 16, F16, E4M3),
    Kind("fp8 dense", None, E4M3, E4M3),
    Kind("fp8", 16, E4M3, E4M3),
    Kind("e5m2", 16, E5M2, E5M2),
)


def call(shape: Shape, kind: Kind) -> Callable[[], object]:
    """A call with random values, its pages shuffled."""
    tokens = shape.sequences * shape.tokens
    bounds = [shape.tokens * i for i in range(shape.sequences + 1)]

    def random(heads: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(tokens, heads, shape.head_dim, device="cuda").to(dtype)

    def ints(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    arguments: dict[str, Any] = {
        "q": random(shape.heads, kind.queries),
        "cu_seqlens_q": ints(bounds),
        "max_seqlen_q": shape.tokens,
        "max_seqlen_k": shape.tokens,
        "causal": True,
    }
    k, v = (random(shape.kv_heads, kind.cache) for _ in range(2))
    if kind.page is None:
        arguments |= {"k": k, "v": v, "cu_seqlens_k": ints(bounds)}
    else:
        # Values are random, so pages of any order do.
        pages = (-1, kind.page, shape.kv_heads, shape.head_dim)
        order = torch.randperm(tokens // kind.page, device="cuda").int()
        arguments |= {"k": k.view(pages), "v": v.view(pages), "block_table": order.view(shape.sequences, -1)}
        arguments |= {"seqused_k": ints([shape.tokens] * shape.sequences)}
    if "alibi" in kind.options:
        arguments["alibi_slopes"] = torch.rand(shape.heads, device="cuda") * 0.1
    if "softcap" in kind.options:
        arguments["softcap"] = 30.0
    return lambda: fx.flash_attn_varlen_func(**arguments)


def microseconds(function: Callable[[], object], calls: int, rounds: int = 5) -> float:
    """The median time of a call, of graphs of some: without the host's time."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def ceiling() -> float:
    """TFLOP/s of a product of bfloat16 matrices."""
    x, y = (torch.randn(8192, 8192, device="cuda", dtype=BF16) for _ in range(2))
    return 2 * 8192**3 / microseconds(lambda: x @ y, 5) / 1e6


def table_time() -> None:
    """Every kind of every shape."""
    print(f"ceiling {ceiling():.0f} TFLOP/s")
    for shape in SHAPES:
        for kind in KINDS:
            us = microseconds(call(shape, kind), 10)
            print(f"{shape} {kind.name}: {us:.0f} us {shape.flops() / us / 1e6:.0f} TFLOP/s", flush=True)
    print(f"ceiling {ceiling():.0f} TFLOP/s")


def table_ab() -> None:
    """Plain calls, TFLOP/s; measured twice, as the first brings the clock to where it stays."""
    line = []
    for shape in SHAPES + SHORT[:3]:
        for kind in KINDS[:2]:
            function = call(shape, kind)
            microseconds(function, 10)
            us = microseconds(function, 10, 9)
            line.append(f"{shape} {kind.name} {shape.flops() / us / 1e6:.0f}")
    print(", ".join(line), f"TFLOP/s; ceiling {ceiling():.0f}")


def table_short() -> None:
    """Prompts that a thread block is soon done with."""
    for shape in SHORT:
        for kind in KINDS[:2]:
            us = microseconds(call(shape, kind), 20)
            print(f"{shape} {kind.name}: {us:.1f} us {shape.flops() / us / 1e6:.0f} TFLOP/s", flush=True)


def table_kernels() -> None:
    """The mean time of each kernel, run by itself: what a call takes beside that is between its kernels."""
    for shape in SHORT:
        for kind in KINDS[:2]:
            function = call(shape, kind)
            function()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                for _ in range(10):
                    function()
                    torch.cuda.synchronize()
            times: dict[str, list[float]] = {}
            for event in profile.events():
                if event.device_time > 0:
                    times.setdefault(event.name.split("<")[0].split("::")[-1], []).append(event.device_time)
            each = ", ".join(f"{name} {statistics.mean(all_):.1f}" for name, all_ in times.items())
            print(f"{shape} {kind.name}: {each} us", flush=True)


def one(case: str) -> None:
    """Four calls, of `plain` if no kind is named. A kind's spaces may be dashes."""
    prompts, _, name = case.partition(":")
    sequences, tokens = map(int, prompts.split("x"))
    kind = next(kind for kind in KINDS if kind.name.replace(" ", "-") == (name or "plain"))
    function = call(Shape(sequences=sequences, tokens=tokens), kind)
    for _ in range(4):
        function()
    torch.cuda.synchronize()


TABLES = {"time": table_time, "short": table_short, "kernels": table_kernels, "ab": table_ab}


def main() -> None:
    """Print the tables that are asked for."""
    if sys.argv[1:2] == ["one"]:
        return one(sys.argv[2])
    print_chosen(TABLES, __doc__)


if __name__ == "__main__":
    main()
