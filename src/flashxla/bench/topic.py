"""What a benchmark is made of: cases, the runs that can serve them, and the work they do."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Options:
    """How a benchmark runs, from the command line."""

    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    device: str = "cpu"
    threads: int = 2
    rounds: int = 7
    peers: bool = False
    quick: bool = False
    frontend: str = "torch"


@dataclasses.dataclass(frozen=True)
class Run:
    """One contender, ready to go.

    call: does the work once. results: from what a call returned, the tensors to compare with the others'.
    """

    call: Callable[[], Any]
    results: Callable[[Any], Sequence[Any]]


class Unavailable(Exception):
    """A contender turns out not to run a case here; the message says why."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """A contender: builds its run from a problem's tensors, outside the timing.

    serves: whether it can run a case on a device. build raises `Unavailable` where only trying shows that it cannot.
    """

    name: str
    build: Callable[[Any], Run]
    serves: Callable[[Any, str], bool] = lambda case, device: True


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """What the machine itself can do: a call and its work in the topic's unit of work."""

    name: str
    call: Callable[[], Any]
    work: float


@dataclasses.dataclass(frozen=True)
class Topic:
    """One benchmark, in one framework: its tensors, dtypes and devices.

    cases: by device, and the tiny ones of --quick; each has a name. problem: a case's tensors. work: what one call
    must do; its rate, divided by scale, is in `unit`. peers: the first that serves is the reference for the results.
    roundings: how many times further the results of contenders may be apart than outputs of attention.
    """

    name: str
    unit: str
    scale: float
    cases: Mapping[str, tuple[Any, ...]]
    problem: Callable[[Any, Any, Any], Any]
    work: Callable[[Any, Any], float]
    ceiling: Callable[[Any, Options], Ceiling]
    ours: Peer
    peers: tuple[Peer, ...]
    roundings: float = 1.0


def log_uniform(low: int, high: int, count: int, seed: int) -> tuple[int, ...]:
    """Lengths of a ragged batch; the same ones on every machine."""
    rng = random.Random(seed)
    return tuple(round(math.exp(rng.uniform(math.log(low), math.log(high)))) for _ in range(count))
