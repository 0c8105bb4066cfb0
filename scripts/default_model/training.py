"""Training with one attention or several: the same weights, batches and schedule for each."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence

import torch
from transformers import LlamaForCausalLM

import flashxla.transformers
from default_model import data
from default_model.model import make_model
from default_model.optimizers import make_optimizers, rate_factor

ATTENTIONS = (flashxla.transformers.NAME, "eager", "sdpa")


@dataclasses.dataclass(frozen=True)
class Options:
    """Of a run."""

    steps: int
    batch: int
    learning_rate: float
    seed: int
    report: int  # steps between lines of progress
    validate: int  # steps between validations
    validation_windows: int | None = None  # all


class Contender:
    """A model in training, and what became of it."""

    def __init__(self, attention: str, options: Options) -> None:
        """attention: transformers' name of it, one of ATTENTIONS."""
        self.attention = attention
        torch.manual_seed(options.seed)
        self.model = make_model()
        self.model.set_attn_implementation(attention)
        self.optimizers = make_optimizers(self.model, options.learning_rate)
        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(o, lambda step: rate_factor(step, options.steps))
            for o in self.optimizers
        ]
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.validation: list[tuple[int, float]] = []  # after so many steps, the loss

    def step(self, batch: data.Batch) -> None:
        """Learn from a batch."""
        started = time.perf_counter()
        loss, targets = loss_of(self.model, batch)
        loss = loss / targets
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule.step()
        self.model.zero_grad()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - started)

    def line(self, last: int) -> str:
        """The mean of the last steps."""
        losses, seconds = self.losses[-last:], self.seconds[-last:]
        return f"{self.attention}: loss {sum(losses) / len(losses):.3f}, {sum(seconds) / len(seconds):.3f} s a step"


def loss_of(model: LlamaForCausalLM, batch: data.Batch) -> tuple[torch.Tensor, int]:
    """The sum of the cross entropy of the next tokens, in nats, and how many there are.

    transformers sees by the positions that the windows are packed: with any of its attentions documents do not see
    each other.
    """
    logits = model(input_ids=batch.tokens, position_ids=batch.positions, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.targets.flatten(), ignore_index=data.NO_TARGET, reduction="sum"
    )
    return loss, int((batch.targets != data.NO_TARGET).sum())


@torch.no_grad()
def mean_loss(model: LlamaForCausalLM, batches: Iterable[data.Batch]) -> float:
    """Of the next token, in nats."""
    total, count = 0.0, 0
    for batch in batches:
        loss, targets = loss_of(model, batch)
        total += loss.item()
        count += targets
    return total / count


def train(text: data.Data, attentions: Sequence[str], options: Options) -> list[Contender]:
    """Train a model with each attention, a step of each in turn: what else the machine does slows down all alike."""
    flashxla.transformers.enable()
    contenders = [Contender(attention, options) for attention in attentions]
    held_out = list(data.held_out(text, options.batch))[: options.validation_windows]
    generator = torch.Generator().manual_seed(options.seed)
    for step in range(1, options.steps + 1):
        batch = data.sample(text, options.batch, generator)
        for contender in contenders:
            contender.step(batch)
            if step % options.validate == 0 or step == options.steps:
                contender.validation.append((step, mean_loss(contender.model, held_out)))
        if step % options.report == 0 or step == options.steps:
            print(
                f"step {step}/{options.steps}",
                *(c.line(options.report) for c in contenders),
                sep="  ",
                flush=True,
            )
    return contenders
