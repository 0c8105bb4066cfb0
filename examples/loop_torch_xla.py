"""A decode loop in PyTorch/XLA: a layer written from scratch, its cache updated in place by compiled programs.

    PJRT_DEVICE=CPU python examples/loop_torch_xla.py
    PJRT_DEVICE=CPU python examples/loop_torch_xla.py --lazy

One module with its own cache writes each new token's keys and values and attends to all of the text so far. Lengths and
places are tensors, so two programs serve the whole loop: the prompt's and one for all single tokens.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch_xla

import flashxla.torch as fx

HEADS, KV_HEADS, DIM, PAGE, PAGES = 8, 2, 64, 16, 16
WIDTH = HEADS * DIM


class Attention(torch.nn.Module):
    """Grouped-query attention over a paged cache of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM, bias=False)
        self.out = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        for name in ("key_cache", "value_cache"):
            self.register_buffer(name, torch.zeros(PAGES, PAGE, KV_HEADS, DIM))

    def forward(self, x: torch.Tensor, length: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """x: [T, width], the last tokens of one text. length: int32 [1], all of its tokens. table: int32 [1, pages]."""
        q, k, v = self.qkv(x).unflatten(-1, (-1, DIM)).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        starts = x.shape[0] * torch.arange(2, dtype=torch.int32, device=x.device)
        out = fx.ragged_paged_attention(
            q,
            k,
            v,
            (self.key_cache, self.value_cache),
            length,
            table,
            starts,
            torch.ones_like(length),
            DIM**-0.5,
        )
        return x + self.out(out.flatten(1))


def main() -> None:
    """Run the loop and hold it against one pass over the whole text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--lazy", action="store_true", help="lazy tensors, not torch.compile(backend='openxla')"
    )
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="(default %(default)s)")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch_xla.device()
    layer = Attention().to(device)
    step = layer if args.lazy else torch.compile(layer, backend="openxla")
    table = torch.randperm(PAGES)[None].to(torch.int32).to(device)
    text = torch.randn(8 + args.tokens, WIDTH)

    with torch.no_grad():
        outs, held = [], 0
        started = time.perf_counter()
        for count in (8, *[1] * args.tokens):  # the prompt, then a token at a time
            new, held = text[held : held + count], held + count
            out = step(new.to(device), torch.tensor([held], dtype=torch.int32).to(device), table)
            if args.lazy:
                torch_xla.sync()  # what is pending becomes one program, the caches' updates too
            outs.append(out.cpu())
        seconds = time.perf_counter() - started
        whole = layer(text.to(device), torch.tensor([len(text)], dtype=torch.int32).to(device), table).cpu()
    difference = (torch.cat(outs) - whole).abs().max().item()
    way = "lazy" if args.lazy else "openxla"
    print(f"{way} on {device}: {args.tokens + 1} steps in {seconds:.2f} s with compilation")
    print(f"largest difference from one pass over the whole text: {difference:.1e}")


if __name__ == "__main__":
    main()
