"""Many sequences with one long prefix, such as a system prompt: attend to the prefix once for all of them.

    python examples/shared_prefix.py
    python examples/shared_prefix.py --sequences 64 --prefix 8192 --device cuda

Attention over all keys is two attentions, over the prefix and over what is a sequence's own, merged by their LSE. Over
the prefix the queries of all sequences are those of one sequence: its keys are read once, not once for each.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

import flashxla.torch as fx

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16


def main() -> None:
    """Attend both ways, compare, time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=16, metavar="N", help="(default %(default)s)")
    parser.add_argument(
        "--prefix", type=int, default=2048, metavar="N", help="tokens of the prefix (default %(default)s)"
    )
    parser.add_argument("--own", type=int, default=64, metavar="N", help="tokens of each sequence behind it")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    count, device = args.sequences, args.device
    prefix_pages, own_pages = -(-args.prefix // PAGE), -(-args.own // PAGE)
    prefix_tokens = prefix_pages * PAGE  # a shared page is full

    # The pages of the prefix, then those of each sequence.
    pages = prefix_pages + count * own_pages
    caches = tuple(torch.randn(pages, PAGE, KV_HEADS, DIM, device=device) for _ in "kv")
    of_prefix = torch.arange(prefix_pages, dtype=torch.int32, device=device)
    own = prefix_pages + torch.arange(count * own_pages, dtype=torch.int32, device=device).reshape(
        count, own_pages
    )
    query = torch.randn(count, HEADS, DIM, device=device)  # one new token a sequence
    one_each = torch.arange(count + 1, dtype=torch.int32, device=device)
    num_seqs = torch.tensor([count], dtype=torch.int32, device=device)
    scale = DIM**-0.5

    tables = torch.cat([of_prefix.expand(count, -1), own], dim=1).contiguous()
    lengths = torch.full((count,), prefix_tokens + args.own, dtype=torch.int32, device=device)

    def plain() -> torch.Tensor:
        return fx.paged_attention(query, caches, lengths, tables, one_each, num_seqs, scale, max_seqlen_q=1)

    prefix_length = torch.tensor([prefix_tokens], dtype=torch.int32, device=device)
    all_queries = torch.tensor([0, count], dtype=torch.int32, device=device)
    one = torch.tensor([1], dtype=torch.int32, device=device)
    own_lengths = torch.full((count,), args.own, dtype=torch.int32, device=device)

    def shared() -> torch.Tensor:
        # All queries see all of the prefix: it lies before each of them.
        over_prefix = fx.paged_attention(
            query,
            caches,
            prefix_length,
            of_prefix[None],
            all_queries,
            one,
            scale,
            causal=False,
            return_softmax_lse=True,
        )
        over_own = fx.paged_attention(
            query,
            caches,
            own_lengths,
            own,
            one_each,
            num_seqs,
            scale,
            return_softmax_lse=True,
            max_seqlen_q=1,
        )
        out, _ = fx.merge_attn_states(*over_prefix, *over_own)
        return out

    difference = (plain() - shared()).abs().max().item()
    times = [best_time(function, device) for function in (plain, shared)]
    print(f"{count} sequences, {prefix_tokens} tokens in common, {args.own} of their own")
    print(f"largest difference {difference:.1e}")
    print(f"each reads the prefix: {times[0] * 1e3:.2f} ms; once for all: {times[1] * 1e3:.2f} ms")


def best_time(function: Callable[[], torch.Tensor], device: str) -> float:
    """Seconds of the fastest of some calls."""
    best = float("inf")
    for _ in range(10):
        started = time.perf_counter()
        function()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return best


if __name__ == "__main__":
    main()
