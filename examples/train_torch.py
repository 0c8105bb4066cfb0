"""Train a small Llama on packed documents in PyTorch: eager, or compiled by XLA.

    python examples/train_torch.py                    # eager, on the CPU
    python examples/train_torch.py --backend openxla  # PyTorch/XLA: XLA compiles forward and backward

Attention is flash_attn_varlen_func: documents of a row do not see each other, and nothing is padded to the longest.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import flashxla.torch as fx

from packed_documents import VOCABULARY, batches  # isort: skip  (a file beside this one)


class Attention(nn.Module):
    """Grouped queries with rotary positions."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.sizes = [heads, kv_heads, kv_heads]
        self.dim = width // heads
        self.qkv = nn.Linear(width, sum(self.sizes) * self.dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], cu_seqlens: Tensor) -> Tensor:
        """x [T, width], the rows of a batch one after the other."""
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.dim)).split(self.sizes, 1)
        q, k = (_rotated(part, *rotation) for part in (q, k))
        longest = x.shape[0]
        out = fx.flash_attn_varlen_func(q, k, v, longest, cu_seqlens, longest, cu_seqlens, causal=True)
        return self.out(out.flatten(1))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Layer(nn.Module):
    """Attention and a gated feed-forward part, each with its norm."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.attention = Attention(width, heads, kv_heads)
        self.up = nn.Linear(width, 6 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], cu_seqlens: Tensor) -> Tensor:
        """x [T, width]."""
        x = x + self.attention(self.norms[0](x), rotation, cu_seqlens)
        gate, value = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * value)


class Model(nn.Module):
    """A Llama. Its forward is the loss."""

    def __init__(self, width: int = 128, layers: int = 3, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.dim = width // heads
        self.embed = nn.Embedding(VOCABULARY, width)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(width, heads, kv_heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)

    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor, cu_seqlens: Tensor) -> Tensor:
        """The mean loss of the tokens that have a target, in nats. All but cu_seqlens [S+1] are [T]."""
        frequencies = 10000.0 ** -(torch.arange(0, self.dim, 2, device=tokens.device) / self.dim)
        angles = (positions[:, None] * frequencies)[:, None]
        rotation = angles.cos(), angles.sin()
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, rotation, cu_seqlens)
        logits = self.norm(x) @ self.embed.weight.T
        return nn.functional.cross_entropy(logits, targets.long(), ignore_index=-1)


def main() -> None:
    """Train, and print the loss."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=("eager", "openxla"), default="eager")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=4, help="of a batch")
    parser.add_argument("--tokens", type=int, default=512, help="of a row")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cpu")
    model = Model()
    loss_of: Callable[..., Tensor] = model
    if args.backend == "openxla":
        import torch_xla

        device = torch_xla.device()
        model.to(device)
        loss_of = torch.compile(model, backend="openxla", fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    started = time.monotonic()
    for step, batch in zip(range(args.steps), batches(args.rows, args.tokens, args.seed), strict=False):
        # The rows become one: a document that begins where another row ends is a document like the others.
        rows = torch.arange(args.rows, dtype=torch.int32)[:, None] * args.tokens
        starts = (torch.from_numpy(batch.cu_seqlens)[:, :-1] + rows).flatten()
        cu_seqlens = torch.cat([starts, starts.new_tensor([args.rows * args.tokens])])
        given = (torch.from_numpy(x).flatten() for x in (batch.tokens, batch.targets, batch.positions))
        loss = loss_of(*(x.to(device) for x in given), cu_seqlens.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == args.steps - 1:
            speed = (step + 1) * args.rows * args.tokens / (time.monotonic() - started)
            print(f"step {step}  loss {loss.item():.3f}  {speed:,.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
