"""The section step: a whole decode step of a Llama-3-8B-shaped model through each front end of XLA.

In JAX with donated caches, here; in PyTorch/XLA in processes of their own, which `xla_process` starts.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from flashxla.bench.gpu import batch as batches
from flashxla.bench.gpu import (
    compare,
    pairs,
    profile,
    shapes,
    step_host,
    step_sizes,
    timers,
    xla_frontends,
    xla_process,
)
from flashxla.bench.gpu.compare import Contender, Prepared, Row, Work
from flashxla.bench.gpu.reference import WrongResult
from flashxla.bench.gpu.settings import Settings

_PEER_TOLERANCE = 1e-1
_KERNELS = "the operations' kernels alone, 1 layer (from PyTorch, a plan each)"


def cases(section: str, settings: Settings) -> list[str]:
    """A batch each."""
    return step_sizes.cases(settings)


def run(section: str, case: str, settings: Settings) -> Iterator[Row]:
    """A step through each front end, and in JAX with each way to do the attention."""
    yield from _in_jax(case, settings)
    compare.free_memory(settings)
    if xla_process.is_installed():
        for frontend in xla_frontends.FRONTENDS:
            yield from xla_process.run(frontend, case, settings)


def _in_jax(case: str, settings: Settings) -> Iterator[Row]:
    """A step with each way to do the attention, and what the operations cost in it."""
    from flashxla.bench.gpu import step_attention

    count, keys = step_sizes.batch_of(case, settings)
    ways = [step_attention.OURS, step_attention.NOTHING]
    if settings.peers:
        ways.append(step_attention.PALLAS)
    if settings.everything:
        ways.append(step_attention.GATHER)
    steps = {way.name: _Step(way, count, keys, settings) for way in ways}
    found = [
        Contender(name, step.prepare, ours=name == step_attention.OURS.name, work=step.work)
        for name, step in steps.items()
    ]
    us: dict[str, float] = {}
    for row in compare.run(case, settings.dtype, found, settings):
        if "us" in row:
            us[row["contender"]] = row["us"]
            row.update(tokens_per_second=count / row["us"] * 1e6, **steps[row["contender"]].facts())
        yield row
    yield from _derived(case, count, keys, us, settings)
    if settings.profile:
        yield {"begin": "profile"}
        for name in us:
            yield profile.row(case, settings.dtype, name, steps[name].dispatch, 1)


def _derived(case: str, count: int, keys: int, us: dict[str, float], settings: Settings) -> Iterator[Row]:
    """A layer's write and attention: in the program, by the difference; and their kernels alone."""
    from flashxla.bench.gpu import step_attention

    config = step_sizes.config(settings)
    without = us.get(step_attention.NOTHING.name)
    for name, time_us in us.items():
        if without is not None and name != step_attention.NOTHING.name:
            yield {
                "case": case,
                "dtype": settings.dtype,
                "contender": f"write + attention by {name}, 1 layer of the step",
                "us": (time_us - without) / config.layers,
                "derived": True,
            }
    if settings.cuda and not torch.cuda.is_available():
        return  # PyTorch has no CUDA, only XLA's front ends have
    shape = shapes.Shape(
        case, shapes.newest(*[keys] * count), heads=config.heads, dim=config.dim, dtype=settings.dtype
    )

    def prepare() -> Prepared:
        batch = batches.build(shape, settings.device)
        return pairs.in_torch(batch, batch.sets)

    for row in compare.run(case, settings.dtype, [Contender(_KERNELS, prepare)], settings):
        yield row if "begin" in row else {**row, "derived": True}


class _Step:
    """A step with one way to do the attention."""

    def __init__(self, way: Any, count: int, keys: int, settings: Settings) -> None:
        self._way, self._count, self._keys, self._settings = way, count, keys, settings
        self._config = step_sizes.config(settings)

    @property
    def work(self) -> Work:
        """Bytes that must be read: the weights, and the keys and values."""
        return step_sizes.work(self._settings, self._count, self._keys, self._way.reads_cache)

    def prepare(self) -> Prepared:
        """Compiles it."""
        import jax
        import jax.numpy as jnp

        from flashxla.bench.gpu import llama, step_attention

        error = _error(self._way, self._settings) if self._way.reads_cache else 0.0
        params = _params(self._config, self._settings.dtype)
        batch = step_attention.batch(self._count, self._keys)
        pages = batch["tables"].size
        caches = [
            self._way.cache(self._config, pages, self._settings.dtype) for _ in range(self._config.layers)
        ]

        @functools.partial(jax.jit, donate_argnums=(1, 2))
        def program(params: Any, caches: Any, tokens: Any, batch: Any) -> Any:
            logits, caches = llama.step(self._config, self._way.attend, params, caches, tokens, batch)
            return jnp.argmax(logits, axis=-1).astype(jnp.int32), caches

        tokens = jnp.zeros(self._count, jnp.int32)
        start = time.perf_counter()
        self._program = program.lower(params, caches, tokens, batch).compile()
        self._compile_seconds = time.perf_counter() - start
        print(f"  compiled in {self._compile_seconds:.0f} s", file=sys.stderr, flush=True)
        self._state = params, caches, tokens, batch
        return Prepared(lambda: error, lambda: timers.ProgramTimer(self.dispatch, 1, seconds=60e-3))

    def dispatch(self) -> Any:
        """One step on the last one's tokens and caches; the lengths stay."""
        params, caches, tokens, batch = self._state
        tokens, caches = self._program(params, caches, tokens, batch)
        self._state = params, caches, tokens, batch
        return tokens

    def facts(self) -> Row:
        """Of the program and of the host. That a step is one program is how it is made."""
        import jax

        return {
            "compile_seconds": self._compile_seconds,
            "temporary_bytes": _temporary_bytes(self._program),
            "compiled_programs": 1,
            "programs_per_step": 1.0,
            **step_host.measure(self.dispatch, jax.block_until_ready),
        }


@functools.cache
def _error(way: Any, settings: Settings) -> float:
    """Of one layer of the same widths, against plain jax.numpy."""
    from flashxla.bench.gpu import step_attention

    right, got = (_logits(one, settings) for one in (step_attention.GATHER, way))
    error = float(((got - right) ** 2).sum() ** 0.5 / (right**2).sum() ** 0.5)
    if not error <= (step_sizes.TOLERANCE if way is step_attention.OURS else _PEER_TOLERANCE):
        raise WrongResult(f"wrong result: relative error {error:.2g} of the logits of one layer")
    return error


@functools.cache
def _logits(way: Any, settings: Settings) -> Any:
    import jax
    import jax.numpy as jnp

    from flashxla.bench.gpu import llama, step_attention

    counts, keys = step_sizes.batches(settings)
    config = dataclasses.replace(step_sizes.config(settings), layers=1, vocab=512)
    batch = step_attention.batch(counts[1], keys)
    caches = [way.cache(config, batch["tables"].size, settings.dtype)]
    tokens = jnp.arange(counts[1], dtype=jnp.int32)
    program = jax.jit(functools.partial(llama.step, config, way.attend))
    return program(llama.init(config, settings.dtype), caches, tokens, batch)[0]


@functools.cache
def _params(config: Any, dtype: str) -> Any:
    """Made once for all batches."""
    from flashxla.bench.gpu import llama

    return llama.init(config, dtype)


def _temporary_bytes(compiled: Any) -> int | None:
    try:
        return int(compiled.memory_analysis().temp_size_in_bytes)
    except (AttributeError, NotImplementedError, RuntimeError):
        return None
