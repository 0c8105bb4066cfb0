"""Decode, prefill and a training step of the installed library, in microseconds: one nvcc's code beside another's."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

import flashxla.torch as fx
from flashxla import native

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
TOKENS, BATCH = 8192, 16


def ints(values: object) -> torch.Tensor:
    """Indices on the GPU."""
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def microseconds(function: Callable[[], object]) -> float:
    """The median of 30 calls, after 5."""
    for _ in range(5):
        function()
    times = []
    for _ in range(30):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def decode(dtype: torch.dtype) -> Callable[[], object]:
    """A token for each of a batch of sequences."""
    pages = BATCH * TOKENS // PAGE
    k, v = (torch.randn(pages, PAGE, KV_HEADS, HEAD_DIM, device="cuda", dtype=dtype) for _ in range(2))
    tables = torch.randperm(pages, device="cuda").to(torch.int32).reshape(BATCH, -1)
    q = torch.randn(BATCH, HEADS, HEAD_DIM, device="cuda", dtype=dtype)
    arguments = (ints([TOKENS] * BATCH), tables, ints(list(range(BATCH + 1))), ints([BATCH]), HEAD_DIM**-0.5)
    return lambda: fx.paged_attention(q, (k, v), *arguments, max_seqlen_q=1)


def prefill() -> Callable[[], torch.Tensor]:
    """A long prompt."""
    q, k, v = (
        torch.randn(TOKENS, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    ends = ints([0, TOKENS])
    return lambda: fx.flash_attn_varlen_func(
        q, k, v, max_seqlen_q=TOKENS, cu_seqlens_q=ends, max_seqlen_k=TOKENS, cu_seqlens_k=ends, causal=True
    )


def main() -> None:
    """Measure and print."""
    print(native.library("cuda").path)
    forward = prefill()
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float32):
            print(f"decode {dtype}: {microseconds(decode(dtype)):.1f} us")
        print(f"prefill bf16: {microseconds(forward):.1f} us")
    print(f"forward and backward bf16: {microseconds(lambda: forward().sum().backward()):.1f} us")


if __name__ == "__main__":
    main()
