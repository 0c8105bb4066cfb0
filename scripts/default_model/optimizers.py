"""The optimizers and their learning rate."""

from __future__ import annotations

import math

import torch


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal (https://kellerjordan.github.io/posts/muon).

    torch.optim.Muon does the same in bfloat16, which costs a CPU without bfloat16 units as much time as the
    gradients themselves; float32 halves that.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], lr: float, weight_decay: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters from their gradients."""
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 0.05)
                update = self.orthogonalize(torch.lerp(p.grad, momentum, 0.95))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                # The size of an AdamW step, so that one learning rate serves both optimizers.
                p.add_(update, alpha=-0.2 * math.sqrt(max(p.shape)) * group["lr"])

    @staticmethod
    def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
        """Bring all singular values near one, by five Newton-Schulz steps."""
        wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
        x = wide / (wide.norm() + 1e-7)
        for _ in range(5):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
        return x if wide is matrix else x.T


def make_optimizers(model: torch.nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [Muon(matrices, rate), torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)]


def rate_factor(step: int, steps: int) -> float:
    """Linear warm-up over the first hundredth, then a cosine down to nothing."""
    warmup = max(1, steps // 100)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
