"""The section step: a decode step of a Llama-3-8B-shaped model as one jitted JAX program with donated caches.

The same step in PyTorch/XLA is `step_xla`, in processes of their own.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import torch

from benchmarks import batch as batches
from benchmarks import compare, llama, llama_jax, overhead, profile, shapes, timers, ways
from benchmarks.compare import Contender, Prepared, Row, WrongResult
from benchmarks.settings import Settings
from benchmarks.ways import Way

_PEER_TOLERANCE = 1e-1


def run(section: str, case: str, settings: Settings) -> Iterator[Row]:
    """A step with each way to do the attention, and what the operations cost in it."""
    count, _ = llama.batch_of(case, settings)
    found = [ways.OURS, ways.NOTHING]
    if settings.peers:
        found.append(ways.PALLAS)
    if settings.everything:
        found.append(ways.GATHER)
    steps = {way.name: _Step(way, case, settings) for way in found}
    contenders = [
        Contender(name, step.prepare, ours=name == ways.OURS.name, work=step.work)
        for name, step in steps.items()
    ]
    us: dict[str, float] = {}
    for row in compare.run(case, settings.dtype, contenders, settings):
        if "us" in row:
            us[row["contender"]] = row["us"]
            row.update(tokens_per_second=count / row["us"] * 1e6, **steps[row["contender"]].facts())
        yield row
    yield from _a_layers_share(case, us, settings)
    for name in us if settings.profile else ():
        yield {"begin": [profile.title(name), False]}
        yield profile.row(case, settings, name, steps[name].dispatch)


def _a_layers_share(case: str, us: dict[str, float], settings: Settings) -> Iterator[Row]:
    """A layer's write and attention: in the program, by the difference; and their kernels alone."""
    config = llama.config(settings)
    count, keys = llama.batch_of(case, settings)
    without = us.get(ways.NOTHING.name)
    for name in us:
        if without is not None and name != ways.NOTHING.name:
            share = (us[name] - without) / config.layers
            yield compare.derived(case, settings, ways.share_of_layer(name), share)
    if settings.cuda and not torch.cuda.is_available():
        return  # PyTorch has no CUDA, only XLA's front ends have
    lens = shapes.newest(*[keys] * count)
    shape = shapes.Shape(case, lens, heads=config.heads, dim=config.dim, dtype=settings.dtype)

    def prepare() -> Prepared:
        batch = batches.build(shape, settings.device)
        return overhead.in_torch(batch, batch.sets)

    for row in compare.run(case, settings.dtype, [Contender(ways.KERNELS, prepare)], settings):
        yield row if "begin" in row else {**row, "derived": True}


class _Step:
    """A step with one way to do the attention."""

    def __init__(self, way: Way, case: str, settings: Settings) -> None:
        self._way, self._settings = way, settings
        self._count, self._keys = llama.batch_of(case, settings)
        self.work = llama.work(settings, self._count, self._keys, way.reads_cache)

    def prepare(self) -> Prepared:
        """Compiles it."""
        way, config, dtype = self._way, llama.config(self._settings), self._settings.dtype
        error = _error(way, self._settings) if way.reads_cache else 0.0
        params = _params(config, dtype)
        batch = _batch(self._count, self._keys)
        caches = [way.cache(config, batch["tables"].size, dtype) for _ in range(config.layers)]

        @functools.partial(jax.jit, donate_argnums=(1, 2))
        def program(params: Any, caches: Any, tokens: Any, batch: Any) -> Any:
            logits, caches = llama_jax.step(config, way.attend, params, caches, tokens, batch)
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
        return {
            "compile_seconds": self._compile_seconds,
            "temporary_bytes": _temporary_bytes(self._program),
            "compiled_programs": 1,
            "programs_per_step": 1.0,
            **timers.host_time(self.dispatch, jax.block_until_ready),
        }


def _batch(count: int, keys: int) -> dict[str, jax.Array]:
    return {name: jnp.asarray(array) for name, array in llama.batch(count, keys).items()}


@functools.cache
def _error(way: Way, settings: Settings) -> float:
    """Of one layer of the same widths, against plain jax.numpy."""
    right, got = (_logits(one, settings) for one in (ways.GATHER, way))
    error = float(((got - right) ** 2).sum() ** 0.5 / (right**2).sum() ** 0.5)
    if not error <= (llama.TOLERANCE if way is ways.OURS else _PEER_TOLERANCE):
        raise WrongResult(f"wrong result: relative error {error:.2g} of the logits of one layer")
    return error


@functools.cache
def _logits(way: Way, settings: Settings) -> Any:
    counts, keys = llama.batches(settings)
    config = llama.one_layer(settings)
    batch = _batch(counts[1], keys)
    caches = [way.cache(config, batch["tables"].size, settings.dtype)]
    tokens = jnp.arange(counts[1], dtype=jnp.int32)
    program = jax.jit(functools.partial(llama_jax.step, config, way.attend))
    return program(llama_jax.init(config, settings.dtype), caches, tokens, batch)[0]


_params = functools.cache(llama_jax.init)  # made once for all batches


def _temporary_bytes(compiled: Any) -> int | None:
    try:
        return int(compiled.memory_analysis().temp_size_in_bytes)
    except (AttributeError, NotImplementedError, RuntimeError):
        return None
