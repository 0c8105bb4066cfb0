"""Operations inside jitted JAX programs: built, checked and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import reference, timers
from benchmarks.batch import Batch
from benchmarks.compare import Prepared

# Above this the host dispatches single calls faster than the device serves them.
_LONG_SECONDS = 400e-6


def array(tensor: torch.Tensor) -> Any:
    """A JAX array of a tensor's memory."""
    import jax

    if tensor.is_cuda:
        torch.cuda.synchronize()
    return jax.dlpack.from_dlpack(tensor.contiguous())


def tensor(array: Any) -> torch.Tensor:
    """A tensor of an array's memory."""
    return torch.from_dlpack(array.block_until_ready())


def chain(
    batch: Batch,
    call: Callable[[Any, Any], Any],
    queries: Any,
    inputs: Sequence[Any],
    ours: bool,
    to_output: Callable[[Any], Any] = lambda out: out,
    note: str = "",
) -> Prepared:
    """call(q, inputs of a set) -> results shaped as q: each call's results are the next one's queries."""
    import jax

    single = jax.jit(call)

    def check() -> float:
        return reference.check(batch, tensor(to_output(single(queries, inputs[0]))), ours)

    def timer() -> timers.Timer:
        jax.block_until_ready(single(queries, inputs[-1]))
        start = time.perf_counter()
        jax.block_until_ready(single(queries, inputs[-1]))
        if time.perf_counter() - start > _LONG_SECONDS:
            return _single_calls(single, queries, inputs)
        count = timers.MIN_CALLS if len(inputs) <= timers.MIN_CALLS else 16

        @jax.jit
        def program(q: Any, sets: Any) -> Any:
            for i in range(count):
                q = call(q, sets[i % len(sets)])
            return q

        sets = tuple(inputs[:count])
        return timers.ProgramTimer(lambda: program(queries, sets), count)

    return Prepared(check, timer, note)


def _single_calls(single: Callable[..., Any], queries: Any, inputs: Sequence[Any]) -> timers.Timer:
    turn = 0

    def run() -> Any:
        nonlocal turn
        turn += 1
        return single(queries, inputs[turn % len(inputs)])

    return timers.ProgramTimer(run, 1)


def donated(
    write: Callable[[tuple[Any, ...], Any], tuple[Any, ...]],
    caches: tuple[Any, ...],
    inputs: Sequence[Any],
    check: Callable[[tuple[Any, ...]], float],
    count: int,
) -> Prepared:
    """write(caches, inputs of a set) -> caches, `count` times in a program that is given its caches to keep."""
    import functools

    import jax

    state = caches

    @functools.partial(jax.jit, donate_argnums=0)
    def once(caches: Any, one: Any) -> Any:
        return write(caches, one)

    @functools.partial(jax.jit, donate_argnums=0)
    def program(caches: Any, sets: Any) -> Any:
        for i in range(count):
            caches = write(caches, sets[i % len(sets)])
        return caches

    def checked() -> float:
        nonlocal state
        state = once(state, inputs[0])
        return check(state)

    def run() -> Any:
        nonlocal state
        state = program(state, tuple(inputs[:count]))
        return state

    return Prepared(checked, lambda: timers.ProgramTimer(run, count))
